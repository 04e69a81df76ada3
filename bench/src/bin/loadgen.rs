//! A closed-loop load generator that checks every token: one thread, one epoll loop.
//!
//! loadgen --port P --body FILE --conns C (--requests N | --secs S) [--ramp-ms R] [--timeout-s T] [--times FILE]
//!
//! Keeps C connections busy with POSTs of FILE to /generate; prints one line of JSON. Exits with 1 if an answer failed.
//! `--times`: a line of JSON for each stream that was complete and right: `at_us`, when its events came (microseconds
//! since 1970), and `moved`, the index of the first of them with another `weight_version` than the first, else null.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpStream;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use dyn_relay_bench::args;
use dyn_relay_bench::check::{Expected, Progress};
use dyn_relay_bench::engine::value;
use dyn_relay_bench::http::Response;
use dyn_relay_bench::sys::{Got, Poller, Wire, IN, OUT};

struct Client {
    wire: Option<Wire>,
    /// A request is out and its answer not complete.
    busy: bool,
    response: Response,
    body: Vec<u8>,
    progress: Progress,
    /// Of the body, so far.
    bytes: u64,
    times: Times,
    started: u64,
    first: u64,
    last_event: u64,
}

/// When the events of a stream came, and which was the first of another worker.
#[derive(Default)]
struct Times {
    at_us: Vec<u64>,
    version: Vec<u8>,
    moved: Option<usize>,
}

impl Times {
    fn add(&mut self, json: &[u8], wall: u64) {
        let version = value(json, "weight_version").and_then(|text| text.split(|byte| *byte == b',').next());
        let version = version.unwrap_or_default();
        if self.at_us.is_empty() {
            self.version = version.to_vec();
        } else if self.moved.is_none() && self.version != version {
            self.moved = Some(self.at_us.len());
        }
        self.at_us.push(wall / 1000);
    }

    fn line(&self) -> String {
        let moved = self.moved.map_or("null".into(), |index| index.to_string());
        format!("{{\"moved\": {moved}, \"at_us\": {:?}}}\n", self.at_us)
    }
}

#[derive(Default)]
struct Stats {
    ok: u64,
    events: u64,
    reads: u64,
    bytes: u64,
    busy: usize,
    busy_max: usize,
    /// Failed answers by kind.
    errors: BTreeMap<&'static str, u64>,
    /// What was wrong with the first of them.
    first_error: String,
    /// Nanoseconds each.
    first_byte: Vec<u64>,
    latency: Vec<u64>,
    gap: Vec<u64>,
    delay: Vec<u64>,
}

struct Load {
    port: u16,
    request: Vec<u8>,
    expected: Expected,
    requests: u64,
    deadline: u64,
    timeout: u64,
    poller: Poller,
    start: Instant,
    clients: Vec<Client>,
    issued: u64,
    ended: u64,
    stats: Stats,
    /// What `--times` is to write.
    lines: Option<String>,
}

impl Load {
    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Send the next request on this connection, opening it if needed, unless enough have been sent.
    fn begin(&mut self, key: usize) {
        while self.issued < self.requests && self.now() < self.deadline {
            self.issued += 1;
            match self.dial(key) {
                Ok(()) => break,
                Err(error) => self.fail("connect", error),
            }
        }
    }

    fn dial(&mut self, key: usize) -> Result<(), String> {
        let now = self.now();
        let client = &mut self.clients[key];
        if client.wire.is_none() {
            let socket = TcpStream::connect(("127.0.0.1", self.port)).map_err(|error| error.to_string())?;
            let wire = Wire::new(socket);
            self.poller.add(&wire.socket, IN, key);
            client.wire = Some(wire);
        }
        client.response = Response::new();
        client.body.clear();
        client.progress = Progress::default();
        (client.bytes, client.times) = (0, Times::default());
        (client.busy, client.started, client.first, client.last_event) = (true, now, 0, 0);
        self.stats.busy += 1;
        self.stats.busy_max = self.stats.busy_max.max(self.stats.busy);
        let wire = client.wire.as_mut().unwrap();
        if wire.send(&self.request) && wire.blocked() {
            self.poller.modify(&wire.socket, IN | OUT, key);
        }
        Ok(())
    }

    fn hang_up(&mut self, key: usize) {
        if let Some(wire) = self.clients[key].wire.take() {
            self.poller.remove(&wire.socket);
        }
    }

    fn fail(&mut self, kind: &'static str, detail: String) {
        self.ended += 1;
        *self.stats.errors.entry(kind).or_default() += 1;
        if self.stats.first_error.is_empty() {
            self.stats.first_error = format!("{kind}: {detail}");
        }
    }

    /// The answer failed: nothing more is read of it.
    fn give_up(&mut self, key: usize, kind: &'static str, detail: String) {
        self.clients[key].busy = false;
        self.stats.busy -= 1;
        self.hang_up(key);
        self.fail(kind, detail);
        self.begin(key);
    }

    fn serve(&mut self, key: usize, flags: u32, buffer: &mut [u8]) {
        let client = &mut self.clients[key];
        let Some(wire) = client.wire.as_mut() else { return };
        if flags & OUT != 0 && wire.flush() && !wire.blocked() {
            self.poller.modify(&wire.socket, IN, key);
        }
        if flags & !OUT == 0 {
            return;
        }
        match wire.read(buffer) {
            Got::Nothing => {}
            Got::Bytes(count) => self.take(key, &buffer[..count]),
            Got::Closed if !client.busy => self.hang_up(key),
            Got::Closed if client.response.ends_with_connection() => {
                client.response.close = true;
                self.complete(key);
            }
            Got::Closed => {
                let detail = format!("closed after {} bytes: {}", client.bytes, excerpt(&client.body));
                self.give_up(key, "truncated", detail);
            }
        }
    }

    fn take(&mut self, key: usize, data: &[u8]) {
        let now = self.now();
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        let Load { clients, stats, expected, lines, .. } = self;
        let client = &mut clients[key];
        stats.reads += 1;
        let before = client.body.len();
        client.response.feed(data, &mut client.body);
        client.bytes += (client.body.len() - before) as u64;
        if client.first == 0 && !client.body.is_empty() {
            client.first = now;
        }
        if client.response.events {
            let mut events = 0;
            let checked = expected.events(&client.body, &mut client.progress, |json| {
                events += 1;
                stats.delay.extend(sent_at(json).map(|sent| wall.saturating_sub(sent)));
                if lines.is_some() {
                    client.times.add(json, wall);
                }
            });
            if let Err(detail) = checked {
                let detail = format!("{detail}: {}", excerpt(&client.body));
                return self.give_up(key, "wrong", detail);
            }
            client.progress.forget(&mut client.body);
            if events > 0 {
                if client.last_event != 0 {
                    stats.gap.push(now - client.last_event);
                }
                client.last_event = now;
                stats.events += events;
            }
        }
        if client.response.done() {
            self.complete(key);
        }
    }

    fn complete(&mut self, key: usize) {
        let now = self.now();
        let client = &mut self.clients[key];
        if client.response.status != 200 {
            let detail = format!("{}: {}", client.response.status, excerpt(&client.body));
            return self.give_up(key, "status", detail);
        }
        let mut checked = Ok(());
        if !client.response.events {
            checked = self.expected.object(&client.body, &mut client.progress);
        }
        checked = checked.and_then(|()| self.expected.whole(&client.progress, client.response.events));
        if let Err(detail) = checked {
            let detail = format!("{detail}: {}", excerpt(&client.body));
            return self.give_up(key, "wrong", detail);
        }
        client.busy = false;
        self.stats.busy -= 1;
        self.stats.ok += 1;
        self.stats.bytes += client.bytes;
        if let Some(lines) = self.lines.as_mut().filter(|_| client.response.events) {
            lines.push_str(&client.times.line());
        }
        self.stats.latency.push(now - client.started);
        self.stats.first_byte.push(client.first - client.started);
        self.ended += 1;
        if client.response.close {
            self.hang_up(key);
        }
        self.begin(key);
    }

    fn expire(&mut self) {
        let now = self.now();
        for key in 0..self.clients.len() {
            if self.clients[key].busy && now > self.clients[key].started + self.timeout {
                let detail = format!("after {} bytes", self.clients[key].bytes);
                self.give_up(key, "timeout", detail);
            }
        }
    }

    /// Run to the end; the connections start over `ramp` nanoseconds. Gives the seconds it took.
    fn run(&mut self, ramp: u64) -> f64 {
        let (mut events, mut buffer) = (Vec::new(), vec![0; 1 << 18]);
        let count = self.clients.len();
        let mut started = 0;
        loop {
            while started < count && self.now() >= ramp * started as u64 / count as u64 {
                self.begin(started);
                started += 1;
            }
            let enough = self.issued >= self.requests || self.now() >= self.deadline;
            if enough && self.issued == self.ended {
                return self.now() as f64 / 1e9;
            }
            let timeout = if started < count { 200_000 } else { 100_000_000 };
            self.poller.wait(Some(timeout), &mut events);
            if events.is_empty() {
                self.expire();
            }
            for (flags, key) in events.drain(..) {
                self.serve(key, flags, &mut buffer);
            }
        }
    }
}

/// When the worker sent this event, in nanoseconds since 1970. None if a proxy has rendered it anew.
fn sent_at(json: &[u8]) -> Option<u64> {
    let text = value(json, "response_sent_to_client_ts")?.strip_suffix(b"}}")?;
    let (seconds, nanoseconds) = std::str::from_utf8(text).ok()?.split_once('.')?;
    (nanoseconds.len() == 9).then_some(())?;
    Some(seconds.parse::<u64>().ok()? * 1_000_000_000 + nanoseconds.parse::<u64>().ok()?)
}

fn excerpt(body: &[u8]) -> String {
    String::from_utf8_lossy(&body[body.len().saturating_sub(200)..]).into_owned()
}

/// `{"p50": .., "p99": .., "max": ..}` in microseconds, null without samples.
fn summary(samples: &mut [u64]) -> String {
    if samples.is_empty() {
        return "null".into();
    }
    samples.sort_unstable();
    let at = |share: f64| samples[((samples.len() - 1) as f64 * share).round() as usize] as f64 / 1000.0;
    format!("{{\"p50\": {:.1}, \"p99\": {:.1}, \"max\": {:.1}}}", at(0.5), at(0.99), at(1.0))
}

fn main() {
    let body = fs::read(args::text("--body").expect("--body FILE")).expect("the body's file");
    let port = args::number("--port", 30000);
    let times = args::text("--times");
    let (conns, secs) = (args::number("--conns", 1), args::number::<u64>("--secs", 0));
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\naccept: */*\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let idle = || Client {
        wire: None,
        busy: false,
        response: Response::new(),
        body: Vec::new(),
        progress: Progress::default(),
        bytes: 0,
        times: Times::default(),
        started: 0,
        first: 0,
        last_event: 0,
    };
    let mut load = Load {
        port,
        request: [head.as_bytes(), &body].concat(),
        expected: Expected::new(&body),
        requests: args::number("--requests", u64::MAX),
        deadline: if secs > 0 { secs * 1_000_000_000 } else { u64::MAX },
        timeout: args::number::<u64>("--timeout-s", 120) * 1_000_000_000,
        poller: Poller::new(),
        start: Instant::now(),
        clients: (0..conns).map(|_| idle()).collect(),
        issued: 0,
        ended: 0,
        stats: Stats::default(),
        lines: times.is_some().then(String::new),
    };
    let seconds = load.run(args::number::<u64>("--ramp-ms", 0) * 1_000_000);
    if let (Some(path), Some(lines)) = (times, &load.lines) {
        fs::write(path, lines).expect("the file of --times");
    }
    let stats = &mut load.stats;
    println!(
        "{{\"ok\": {}, \"errors\": {:?}, \"first_error\": {:?}, \"seconds\": {seconds:.3}, \"rps\": {:.2}, \"bytes\": {}, \"events\": {}, \"reads\": {}, \"busy_max\": {}, \"first_byte_us\": {}, \"latency_us\": {}, \"gap_us\": {}, \"delay_us\": {}}}",
        stats.ok,
        stats.errors,
        stats.first_error.replace(|c: char| !c.is_ascii_graphic() && c != ' ', "?"),
        stats.ok as f64 / seconds,
        stats.bytes,
        stats.events,
        stats.reads,
        stats.busy_max,
        summary(&mut stats.first_byte),
        summary(&mut stats.latency),
        summary(&mut stats.gap),
        summary(&mut stats.delay),
    );
    std::process::exit(i32::from(!stats.errors.is_empty()));
}
