//! The floor: a TCP relay that reads nothing of what it relays. One read and one write for each piece that arrives.
//!
//! relay --port P --up PORT

use std::net::TcpStream;

use dyn_relay_bench::args;
use dyn_relay_bench::sys::{self, Got, Poller, Wire, IN, OUT};

const LISTENER: usize = usize::MAX;

/// One of the two connections of a pair; those of pair n have the keys 2n and 2n + 1.
struct Half {
    wire: Wire,
    /// What epoll is asked for.
    wanted: u32,
}

struct Relay {
    poller: Poller,
    halves: Vec<Option<Half>>,
    free: Vec<usize>,
}

impl Relay {
    fn join(&mut self, client: TcpStream, worker: TcpStream) {
        let first = self.free.pop().unwrap_or_else(|| {
            self.halves.extend([None, None]);
            self.halves.len() - 2
        });
        for (key, socket) in [(first, client), (first + 1, worker)] {
            let half = Half { wire: Wire::new(socket), wanted: IN };
            self.poller.add(&half.wire.socket, IN, key);
            self.halves[key] = Some(half);
        }
    }

    fn drop(&mut self, key: usize) {
        let first = key & !1;
        for half in self.halves[first..first + 2].iter_mut().filter_map(Option::take) {
            self.poller.remove(&half.wire.socket);
        }
        self.free.push(first);
    }

    fn want(&mut self, key: usize, wanted: u32) {
        let half = self.halves[key].as_mut().unwrap();
        if half.wanted != wanted {
            half.wanted = wanted;
            self.poller.modify(&half.wire.socket, wanted, key);
        }
    }

    /// A socket is ready. False: the pair is at its end.
    fn serve(&mut self, key: usize, flags: u32, buffer: &mut [u8]) -> bool {
        let peer = key ^ 1;
        let Some(half) = self.halves[key].as_mut() else { return true };
        if flags & OUT != 0 {
            if !half.wire.flush() {
                return false;
            }
            if !half.wire.blocked() {
                let (mine, other) = (half.wanted & !OUT, self.halves[peer].as_ref().unwrap().wanted | IN);
                self.want(key, mine);
                self.want(peer, other);
            }
        }
        if flags & !OUT == 0 {
            return true;
        }
        match self.halves[key].as_mut().unwrap().wire.read(buffer) {
            Got::Nothing => true,
            Got::Closed => false,
            Got::Bytes(count) => self.pass(key, peer, &buffer[..count]),
        }
    }

    fn pass(&mut self, key: usize, peer: usize, data: &[u8]) -> bool {
        let sink = self.halves[peer].as_mut().unwrap();
        if !sink.wire.send(data) {
            return false;
        }
        if sink.wire.blocked() {
            let (other, mine) = (sink.wanted | OUT, self.halves[key].as_ref().unwrap().wanted & !IN);
            self.want(peer, other);
            self.want(key, mine);
        }
        true
    }
}

fn main() {
    let listener = sys::listen_on(args::number("--port", 30000));
    let up: u16 = args::number("--up", 30001);
    let mut relay = Relay { poller: Poller::new(), halves: Vec::new(), free: Vec::new() };
    relay.poller.add(&listener, IN, LISTENER);
    let (mut events, mut buffer) = (Vec::new(), vec![0; 65536]);
    loop {
        relay.poller.wait(None, &mut events);
        for (flags, key) in events.drain(..) {
            if key != LISTENER {
                if !relay.serve(key, flags, &mut buffer) {
                    relay.drop(key);
                }
                continue;
            }
            while let Ok((client, _)) = listener.accept() {
                if let Ok(worker) = TcpStream::connect(("127.0.0.1", up)) {
                    relay.join(client, worker);
                }
            }
        }
    }
}
