//! A fast mock SGLang worker: one thread, one epoll loop.
//!
//! mockworker --port P [--step-us S [--first-us F]] [--sync] [--mode incremental|cumulative] [--kill-share F --seed N]
//!            [--hold] [--weight-version V]
//!
//! A stream gets a token every S microseconds (0: as fast as its socket takes them), one write an event, and all
//! streams tick together with `--sync`, as in an engine that batches continuously. A unary answer takes as long as its
//! tokens. With `--kill-share`, that share of the streams is cut in the middle, after a token that the seed and the
//! request's number choose; every other such cut by RST instead of FIN. The first token of a paced answer comes after F
//! microseconds (S by default, and with `--sync` always). With `--hold` all but the shortest requests wait before their
//! last event until somebody asks for /mock_release, so that one can look at what a proxy holds of them until then.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::net::TcpStream;
use std::rc::Rc;
use std::time::Instant;

use dyn_relay_bench::engine::{mix, Ask, History};
use dyn_relay_bench::render::{self, Answer};
use dyn_relay_bench::sys::{self, Got, Poller, Wire, IN, OUT};
use dyn_relay_bench::{args, http};

const LISTENER: usize = usize::MAX;
/// Requests for fewer tokens are not held: they only ask whether a server is there.
const HELD_TOKENS: usize = 8;

struct Options {
    port: u16,
    step: u64,
    first: u64,
    sync: bool,
    hold: bool,
    version: String,
    cumulative: bool,
    kill_share: f64,
    seed: u64,
}

/// A cut in the middle of a stream.
#[derive(Clone, Copy)]
struct Cut {
    after: usize,
    reset: bool,
}

/// A request in progress.
struct Job {
    ask: Ask,
    rid: String,
    answer: Rc<Answer>,
    /// Tokens sent.
    sent: usize,
    cut: Option<Cut>,
    held: bool,
}

impl Job {
    /// How far the next event goes: the first token at once, then every `stream_interval` tokens, the last at once.
    fn next(&self) -> usize {
        let step = if !self.ask.stream {
            self.ask.max_new_tokens
        } else if self.sent == 0 {
            1
        } else {
            self.ask.stream_interval
        };
        (self.sent + step).min(self.ask.max_new_tokens)
    }
}

struct Client {
    wire: Wire,
    input: Vec<u8>,
    /// Tells a timer that the client it was set for is still the one in this place, at the same request.
    turn: u64,
    due: u64,
    job: Option<Job>,
    close: bool,
}

#[derive(Default)]
struct Counts {
    requests: u64,
    finished: u64,
    cut: u64,
    left: u64,
    /// Streams that wait for their first token, now and at most since somebody last asked.
    waiting: u64,
    waiting_max: u64,
}

struct Worker {
    options: Options,
    poller: Poller,
    start: Instant,
    clients: Vec<Option<Client>>,
    free: Vec<usize>,
    turns: u64,
    timers: BinaryHeap<Reverse<(u64, usize, u64)>>,
    /// With a step of 0: those whose sockets take more.
    ready: VecDeque<(usize, u64)>,
    /// Those that wait for `/mock_release`.
    held: Vec<(usize, u64)>,
    answers: HashMap<(History, usize), Rc<Answer>>,
    counts: Counts,
    out: Vec<u8>,
    object: Vec<u8>,
}

impl Worker {
    fn new(options: Options) -> Worker {
        Worker {
            options,
            poller: Poller::new(),
            start: Instant::now(),
            clients: Vec::new(),
            free: Vec::new(),
            turns: 0,
            timers: BinaryHeap::new(),
            ready: VecDeque::new(),
            held: Vec::new(),
            answers: HashMap::new(),
            counts: Counts::default(),
            out: Vec::new(),
            object: Vec::new(),
        }
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn run(&mut self) {
        let listener = sys::listen_on(self.options.port);
        self.poller.add(&listener, IN, LISTENER);
        let (mut events, mut buffer) = (Vec::new(), vec![0; 1 << 18]);
        loop {
            let timeout = match (self.ready.is_empty(), self.timers.peek()) {
                (false, _) => Some(0),
                (true, Some(Reverse((due, ..)))) => Some(due.saturating_sub(self.now())),
                (true, None) => None,
            };
            self.poller.wait(timeout, &mut events);
            for (flags, key) in events.drain(..) {
                if key == LISTENER {
                    while let Ok((socket, _)) = listener.accept() {
                        self.join(socket);
                    }
                } else if !self.serve(key, flags, &mut buffer) {
                    self.drop(key);
                }
            }
            self.tick();
        }
    }

    fn join(&mut self, socket: TcpStream) {
        let client = Client { wire: Wire::new(socket), input: Vec::new(), turn: 0, due: 0, job: None, close: false };
        let key = self.free.pop().unwrap_or_else(|| {
            self.clients.push(None);
            self.clients.len() - 1
        });
        self.poller.add(&client.wire.socket, IN, key);
        self.clients[key] = Some(client);
    }

    fn drop(&mut self, key: usize) {
        if let Some(client) = self.clients[key].take() {
            self.counts.left += u64::from(client.job.is_some());
            self.counts.waiting -= u64::from(client.job.is_some_and(|job| job.ask.stream && job.sent == 0));
            self.held.retain(|(held, _)| *held != key);
            self.poller.remove(&client.wire.socket);
            self.free.push(key);
        }
    }

    /// A socket is ready. False: the connection is at its end.
    fn serve(&mut self, key: usize, flags: u32, buffer: &mut [u8]) -> bool {
        let Some(client) = self.clients[key].as_mut() else { return true };
        if flags & OUT != 0 {
            if !client.wire.flush() {
                return false;
            }
            if !client.wire.blocked() {
                self.poller.modify(&client.wire.socket, IN, key);
                if self.options.step == 0 && client.job.is_some() {
                    self.ready.push_back((key, client.turn));
                }
            }
        }
        if flags & !OUT != 0 {
            match client.wire.read(buffer) {
                Got::Bytes(count) => client.input.extend_from_slice(&buffer[..count]),
                Got::Nothing => {}
                Got::Closed => return false,
            }
        }
        self.answer_requests(key)
    }

    fn answer_requests(&mut self, key: usize) -> bool {
        loop {
            let client = self.clients[key].as_mut().unwrap();
            if client.job.is_some() {
                return true;
            }
            let Some(request) = http::request(&client.input) else { return true };
            client.close = request.close;
            let body = client.input[request.body.clone()].to_vec();
            client.input.drain(..request.body.end);
            self.out.clear();
            match request.path.split('?').next().unwrap() {
                "/generate" => self.begin(key, Ask::parse(&body)),
                "/mock_release" => self.release(),
                path => {
                    match info(path, &self.options, &self.counts, self.held.len()) {
                        Some(body) => render::json(body.as_bytes(), &mut self.out),
                        None => render::not_found(&mut self.out),
                    }
                    if path == "/mock_stats" {
                        self.counts.waiting_max = self.counts.waiting;
                    }
                }
            }
            if !self.send(key) {
                return false;
            }
            let client = self.clients[key].as_ref().unwrap();
            if client.close && client.job.is_none() {
                return false;
            }
        }
    }

    fn begin(&mut self, key: usize, ask: Ask) {
        self.counts.requests += 1;
        self.turns += 1;
        let number = self.counts.requests;
        let (tokens, step, first, now) = (ask.max_new_tokens, self.options.step, self.options.first, self.now());
        let history = History::of(&ask.prompt);
        let answer = self.answers.entry((history, tokens)).or_insert_with(|| Rc::new(Answer::new(history, tokens)));
        let due = match ask.stream {
            true if step > 0 && self.options.sync => (now / step + 1) * step,
            true => now + first,
            false => now + first + step * tokens.saturating_sub(1) as u64,
        };
        if ask.stream {
            render::stream_head(&mut self.out);
            self.counts.waiting += 1;
            self.counts.waiting_max = self.counts.waiting_max.max(self.counts.waiting);
        }
        let job = Job {
            rid: ask.rid.clone().unwrap_or_else(|| format!("{:016x}{number:016x}", self.options.port)),
            cut: self.options.cut(number, &ask),
            answer: answer.clone(),
            sent: 0,
            held: false,
            ask,
        };
        let client = self.clients[key].as_mut().unwrap();
        client.turn = self.turns;
        client.job = Some(job);
        self.schedule(key, due);
    }

    fn schedule(&mut self, key: usize, due: u64) {
        let client = self.clients[key].as_mut().unwrap();
        client.due = due;
        if self.options.step > 0 {
            self.timers.push(Reverse((due, key, client.turn)));
        } else if !client.wire.blocked() {
            self.ready.push_back((key, client.turn));
        }
    }

    /// Let those go on that wait before their last event.
    fn release(&mut self) {
        self.ready.extend(self.held.drain(..));
        render::json(b"", &mut self.out);
    }

    /// Send the events that are due, one for each of the streams.
    fn tick(&mut self) {
        for _ in 0..self.ready.len() {
            let (key, turn) = self.ready.pop_front().unwrap();
            self.emit(key, turn);
        }
        let now = self.now();
        while let Some(&Reverse((due, key, turn))) = self.timers.peek() {
            if due > now {
                break;
            }
            self.timers.pop();
            self.emit(key, turn);
        }
    }

    fn emit(&mut self, key: usize, turn: u64) {
        let Some(client) = self.clients[key].as_mut().filter(|client| client.turn == turn) else { return };
        let Some(job) = client.job.as_mut() else { return };
        if let Some(cut) = job.cut.filter(|cut| job.sent >= cut.after) {
            if cut.reset {
                sys::reset_on_close(&client.wire.socket);
            }
            client.job = None;
            self.counts.cut += 1;
            return self.drop(key);
        }
        let (before, to) = (job.sent, job.next());
        let finished = to == job.ask.max_new_tokens;
        if self.options.hold && finished && to >= HELD_TOKENS && !job.held {
            job.held = true;
            return self.held.push((key, turn));
        }
        self.counts.waiting -= u64::from(job.ask.stream && before == 0);
        let from = if self.options.cumulative { 0 } else { before };
        self.object.clear();
        self.out.clear();
        job.answer.object(&job.ask, &job.rid, &self.options.version, from, to, &mut self.object);
        job.sent = to;
        if job.ask.stream {
            render::chunked_event(&self.object, &mut self.out);
        } else {
            render::json(&self.object, &mut self.out);
        }
        if finished {
            if job.ask.stream {
                render::stream_end(&mut self.out);
            }
            client.job = None;
            self.counts.finished += 1;
        }
        let due = client.due + self.options.step * (to - before) as u64;
        let close = finished && client.close;
        if !self.send(key) || close {
            return self.drop(key);
        }
        if !finished {
            self.schedule(key, due);
        } else if !self.answer_requests(key) {
            self.drop(key);
        }
    }

    /// Send what is in `out`. False: the client is gone.
    fn send(&mut self, key: usize) -> bool {
        let client = self.clients[key].as_mut().unwrap();
        let was_blocked = client.wire.blocked();
        if !client.wire.send(&self.out) {
            return false;
        }
        if client.wire.blocked() && !was_blocked {
            self.poller.modify(&client.wire.socket, IN | OUT, key);
        }
        true
    }
}

impl Options {
    /// Is request `number` cut, and where? Never before the first token nor after the last.
    fn cut(&self, number: u64, ask: &Ask) -> Option<Cut> {
        let chance = mix(mix(self.seed ^ (number << 20)) ^ number);
        let chosen =
            ask.stream && ask.max_new_tokens > 1 && ((chance >> 32) as f64) < self.kill_share * f64::from(u32::MAX);
        let span = ask.max_new_tokens.saturating_sub(1).max(1) as u64;
        chosen.then(|| Cut { after: 1 + (chance % span) as usize, reset: number.is_multiple_of(2) })
    }
}

/// The body of an information route; None for a route that is not there.
fn info(path: &str, options: &Options, counts: &Counts, held: usize) -> Option<String> {
    let version = &options.version;
    let model = format!("\"model_path\":\"mock\",\"served_model_name\":\"mock\",\"tokenizer_path\":\"mock\",\"preferred_sampling_params\":null,\"weight_version\":\"{version}\",\"load_format\":\"auto\",\"disaggregation_mode\":\"null\"");
    Some(match path {
        "/health" | "/health_generate" | "/ready" | "/ping" | "/abort_request" => String::new(),
        "/server_info" | "/get_server_info" => format!(
            "{{{model},\"version\":\"0.5.23\",\"port\":{},\"skip_tokenizer_init\":true,\"stream_interval\":1,\"incremental_streaming_output\":{},\"tp_size\":1,\"dp_size\":1,\"pp_size\":1,\"context_length\":131072,\"max_total_num_tokens\":1000000,\"max_req_input_len\":131066,\"max_running_requests\":4096,\"load_balance_method\":\"round_robin\",\"is_embedding\":false,\"internal_states\":[{{}}]}}",
            options.port, !options.cumulative
        ),
        "/model_info" | "/get_model_info" => format!(
            "{{{model},\"is_generation\":true,\"reasoning_parser\":null,\"tool_call_parser\":null,\"has_image_understanding\":false,\"has_audio_understanding\":false,\"model_type\":\"qwen3\",\"architectures\":[\"Qwen3ForCausalLM\"]}}"
        ),
        "/v1/models" => "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1795966390,\"owned_by\":\"sglang\",\"root\":\"mock\",\"parent\":null,\"max_model_len\":131072}]}".into(),
        "/mock_stats" => format!(
            "{{\"requests\":{},\"finished\":{},\"cut\":{},\"left\":{},\"held\":{held},\"waiting_max\":{}}}",
            counts.requests, counts.finished, counts.cut, counts.left, counts.waiting_max
        ),
        _ => return None,
    })
}

fn main() {
    let mode = args::text("--mode").unwrap_or("cumulative".into());
    assert!(["incremental", "cumulative"].contains(&mode.as_str()), "--mode {mode}?");
    let step = args::number::<u64>("--step-us", 0);
    let options = Options {
        port: args::number("--port", 30001),
        step: step * 1000,
        first: args::number("--first-us", step) * 1000,
        sync: args::flag("--sync"),
        hold: args::flag("--hold"),
        version: args::text("--weight-version").unwrap_or("default".into()),
        cumulative: mode == "cumulative",
        kill_share: args::number("--kill-share", 0.0),
        seed: args::number("--seed", 0),
    };
    Worker::new(options).run();
}
