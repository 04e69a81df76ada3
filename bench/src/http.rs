//! As much of HTTP/1.1 as two well-behaved programs of one project need.

use crate::sys::{last_position, position};

/// A request head with its body, as offsets into the buffer that it was read into.
pub struct Request {
    pub path: String,
    pub body: std::ops::Range<usize>,
    pub close: bool,
}

/// The first whole request in `buffer`. Panics on a chunked request body: no proxy here sends one.
pub fn request(buffer: &[u8]) -> Option<Request> {
    let head_end = find(buffer, b"\r\n\r\n")?;
    let head = std::str::from_utf8(&buffer[..head_end]).expect("a head in ASCII");
    let (first, fields) = head.split_once("\r\n").unwrap_or((head, ""));
    let path = first.split(' ').nth(1).unwrap_or("/").to_string();
    assert!(field(fields, "transfer-encoding").is_none(), "chunked request bodies are not read here");
    let length = field(fields, "content-length").map_or(0, |value| value.parse().expect("a length"));
    let close = field(fields, "connection").is_some_and(|value| value.eq_ignore_ascii_case("close"));
    let start = head_end + 4;
    (buffer.len() >= start + length).then_some(Request { path, body: start..start + length, close })
}

/// The value of a header field in the lines of a head.
fn field<'a>(lines: &'a str, name: &str) -> Option<&'a str> {
    let pairs = lines.split("\r\n").filter_map(|line| line.split_once(':'));
    pairs.into_iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
}

enum State {
    Head,
    Sized(usize),
    ChunkSize,
    Chunk(usize),
    ChunkEnd,
    Trailer,
    UntilClose,
    Done,
}

/// Reads one response; the body comes out without its framing.
pub struct Response {
    state: State,
    line: Vec<u8>,
    pub status: u16,
    pub events: bool,
    pub close: bool,
}

impl Response {
    #[allow(clippy::new_without_default)]
    pub fn new() -> Response {
        Response { state: State::Head, line: Vec::new(), status: 0, events: false, close: false }
    }

    pub fn done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// May the end of the connection be the end of this response?
    pub fn ends_with_connection(&self) -> bool {
        matches!(self.state, State::UntilClose)
    }

    /// Take what was read; append the body's bytes to `body`.
    pub fn feed(&mut self, mut data: &[u8], body: &mut Vec<u8>) {
        while !data.is_empty() {
            match self.state {
                State::Head => {
                    let Some(rest) = self.take_until(data, b"\r\n\r\n") else { return };
                    data = rest;
                    self.head();
                }
                State::Sized(left) => {
                    data = self.copy(data, left, body, State::Sized, State::Done);
                }
                State::Chunk(left) => {
                    data = self.copy(data, left, body, State::Chunk, State::ChunkEnd);
                }
                State::ChunkSize => {
                    let Some(rest) = self.take_until(data, b"\r\n") else { return };
                    data = rest;
                    let digits = std::str::from_utf8(&self.line).expect("a chunk size in ASCII").trim();
                    let size = usize::from_str_radix(digits, 16).expect("a chunk size");
                    self.state = if size == 0 { State::Trailer } else { State::Chunk(size) };
                    self.line.clear();
                }
                State::ChunkEnd | State::Trailer => {
                    let Some(rest) = self.take_until(data, b"\r\n") else { return };
                    data = rest;
                    let blank = self.line == b"\r\n";
                    self.state = match self.state {
                        State::ChunkEnd => State::ChunkSize,
                        _ if blank => State::Done,
                        _ => State::Trailer,
                    };
                    self.line.clear();
                }
                State::UntilClose => {
                    body.extend_from_slice(data);
                    return;
                }
                State::Done => panic!("bytes after the end of a response"),
            }
        }
    }

    /// Move bytes up to and with `end` into `line`; give the rest, or None if `end` has not come yet.
    fn take_until<'a>(&mut self, data: &'a [u8], end: &[u8]) -> Option<&'a [u8]> {
        if self.line.is_empty() {
            if let Some(at) = find(data, end) {
                let (line, rest) = data.split_at(at + end.len());
                self.line.extend_from_slice(line);
                return Some(rest);
            }
        }
        let before = self.line.len();
        let from = before.saturating_sub(end.len() - 1);
        self.line.extend_from_slice(data);
        let stop = from + find(&self.line[from..], end)? + end.len();
        self.line.truncate(stop);
        Some(&data[stop - before..])
    }

    fn copy<'a>(
        &mut self,
        data: &'a [u8],
        left: usize,
        body: &mut Vec<u8>,
        more: fn(usize) -> State,
        next: State,
    ) -> &'a [u8] {
        let count = left.min(data.len());
        body.extend_from_slice(&data[..count]);
        self.state = if count == left { next } else { more(left - count) };
        &data[count..]
    }

    fn head(&mut self) {
        let head = String::from_utf8_lossy(&self.line).into_owned();
        self.line.clear();
        let (first, fields) = head.trim_end().split_once("\r\n").unwrap_or((&head, ""));
        self.status = first.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        self.events = field(fields, "content-type").is_some_and(|value| value.starts_with("text/event-stream"));
        self.close = field(fields, "connection").is_some_and(|value| value.eq_ignore_ascii_case("close"));
        self.state = if field(fields, "transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked")) {
            State::ChunkSize
        } else {
            match field(fields, "content-length").map(|value| value.parse().expect("a length")) {
                Some(0) => State::Done,
                Some(length) => State::Sized(length),
                None => State::UntilClose,
            }
        };
    }
}

/// Where `needle` begins in `hay`.
pub fn find(hay: &[u8], needle: &[u8]) -> Option<usize> {
    let mut from = 0;
    while let Some(at) = position(&hay[from..], needle[0]) {
        if hay[from + at..].starts_with(needle) {
            return Some(from + at);
        }
        from += at + 1;
    }
    None
}

/// Where `needle` begins for the last time in `hay`: in JSON the last of two equal keys wins.
pub fn find_last(hay: &[u8], needle: &[u8]) -> Option<usize> {
    let mut end = hay.len();
    while let Some(at) = last_position(&hay[..end], needle[0]) {
        if hay[at..].starts_with(needle) {
            return Some(at);
        }
        end = at;
    }
    None
}
