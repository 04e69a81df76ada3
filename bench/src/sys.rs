//! Linux: epoll, and sockets that never block. The C functions that std lacks are declared by hand.

use std::ffi::{c_int, c_long, c_void};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;

extern "C" {
    fn epoll_create1(flags: c_int) -> c_int;
    fn epoll_ctl(epoll: c_int, op: c_int, fd: c_int, event: *mut Event) -> c_int;
    fn epoll_pwait2(
        epoll: c_int,
        events: *mut Event,
        max: c_int,
        timeout: *const Timespec,
        mask: *const c_void,
    ) -> c_int;
    fn listen(fd: c_int, backlog: c_int) -> c_int;
    fn memchr(data: *const c_void, byte: c_int, len: usize) -> *const c_void;
    fn memrchr(data: *const c_void, byte: c_int, len: usize) -> *const c_void;
    fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: u32) -> c_int;
}

pub const IN: u32 = 0x1;
pub const OUT: u32 = 0x4;

const ADD: c_int = 1;
const DELETE: c_int = 2;
const MODIFY: c_int = 3;
const BATCH: usize = 1024;

#[repr(C, packed)]
#[derive(Clone, Copy)]
struct Event {
    events: u32,
    data: u64,
}

#[repr(C)]
struct Timespec {
    seconds: i64,
    nanoseconds: c_long,
}

/// An epoll descriptor; every registered socket carries a key of the caller's.
pub struct Poller {
    fd: c_int,
    events: Vec<Event>,
}

impl Poller {
    #[allow(clippy::new_without_default)]
    pub fn new() -> Poller {
        let fd = unsafe { epoll_create1(0) };
        assert!(fd >= 0, "epoll_create1: {}", io::Error::last_os_error());
        Poller { fd, events: vec![Event { events: 0, data: 0 }; BATCH] }
    }

    fn control(&self, op: c_int, fd: RawFd, events: u32, key: usize) {
        let mut event = Event { events, data: key as u64 };
        let result = unsafe { epoll_ctl(self.fd, op, fd, &mut event) };
        assert!(result == 0, "epoll_ctl: {}", io::Error::last_os_error());
    }

    pub fn add(&self, socket: &impl AsRawFd, events: u32, key: usize) {
        self.control(ADD, socket.as_raw_fd(), events, key);
    }

    pub fn modify(&self, socket: &impl AsRawFd, events: u32, key: usize) {
        self.control(MODIFY, socket.as_raw_fd(), events, key);
    }

    pub fn remove(&self, socket: &impl AsRawFd) {
        self.control(DELETE, socket.as_raw_fd(), 0, 0);
    }

    /// Wait at most `timeout` nanoseconds (None: for ever); put what is ready into `ready` as (events, key).
    pub fn wait(&mut self, timeout: Option<u64>, ready: &mut Vec<(u32, usize)>) {
        let limit = timeout
            .map(|ns| Timespec { seconds: (ns / 1_000_000_000) as i64, nanoseconds: (ns % 1_000_000_000) as c_long });
        let limit = limit.as_ref().map_or(ptr::null(), ptr::from_ref);
        let count = unsafe { epoll_pwait2(self.fd, self.events.as_mut_ptr(), BATCH as c_int, limit, ptr::null()) };
        ready.clear();
        ready.extend(self.events[..count.max(0) as usize].iter().map(|event| (event.events, event.data as usize)));
    }
}

/// Listen on the loopback address with a backlog that a burst of clients does not overrun.
pub fn listen_on(port: u16) -> TcpListener {
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap_or_else(|error| panic!("port {port}: {error}"));
    unsafe { listen(listener.as_raw_fd(), 4096) };
    listener.set_nonblocking(true).unwrap();
    listener
}

/// Closing this socket will now send RST and drop what is unsent.
pub fn reset_on_close(socket: &TcpStream) {
    const SOL_SOCKET: c_int = 1;
    const SO_LINGER: c_int = 13;
    let linger: [c_int; 2] = [1, 0];
    unsafe { setsockopt(socket.as_raw_fd(), SOL_SOCKET, SO_LINGER, linger.as_ptr().cast(), 8) };
}

/// What a read found.
pub enum Got {
    Bytes(usize),
    Nothing,
    Closed,
}

/// A socket that never blocks, and what it has not taken yet.
pub struct Wire {
    pub socket: TcpStream,
    pending: Vec<u8>,
    written: usize,
}

impl Wire {
    pub fn new(socket: TcpStream) -> Wire {
        // A peer that is already gone shows at the first read or write.
        socket.set_nonblocking(true).ok();
        socket.set_nodelay(true).ok();
        Wire { socket, pending: Vec::new(), written: 0 }
    }

    pub fn read(&mut self, buffer: &mut [u8]) -> Got {
        match self.socket.read(buffer) {
            Ok(0) => Got::Closed,
            Ok(count) => Got::Bytes(count),
            Err(error) if again(&error) => Got::Nothing,
            Err(_) => Got::Closed,
        }
    }

    /// Is something waiting to be written? Then ask epoll for `OUT` and call `flush`.
    pub fn blocked(&self) -> bool {
        self.written < self.pending.len()
    }

    /// Write `data` after what is pending. False: the peer is gone.
    pub fn send(&mut self, data: &[u8]) -> bool {
        let mut taken = 0;
        if !self.blocked() {
            taken = match self.socket.write(data) {
                Ok(count) => count,
                Err(error) if again(&error) => 0,
                Err(_) => return false,
            };
        }
        self.pending.extend_from_slice(&data[taken..]);
        true
    }

    /// Write what is pending. False: the peer is gone.
    pub fn flush(&mut self) -> bool {
        match self.socket.write(&self.pending[self.written..]) {
            Ok(count) => self.written += count,
            Err(error) if again(&error) => {}
            Err(_) => return false,
        }
        if !self.blocked() {
            self.pending.clear();
            self.written = 0;
        }
        true
    }
}

fn again(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Where `byte` is first in `data`, at the speed of the C library.
pub fn position(data: &[u8], byte: u8) -> Option<usize> {
    let start = data.as_ptr();
    let found = unsafe { memchr(start.cast(), byte.into(), data.len()) };
    (!found.is_null()).then(|| found as usize - start as usize)
}

/// Where `byte` is last in `data`.
pub fn last_position(data: &[u8], byte: u8) -> Option<usize> {
    let start = data.as_ptr();
    let found = unsafe { memrchr(start.cast(), byte.into(), data.len()) };
    (!found.is_null()).then(|| found as usize - start as usize)
}
