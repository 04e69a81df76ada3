//! Answers in the words of stock SGLang 0.5.23 with `--skip-tokenizer-init`: the same keys in the same order.
//!
//! One thing differs: every event carries `response_sent_to_client_ts` (stock: the first one of a stream), because the
//! load generator takes the delay from it. It is always last, with nine decimals.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::engine::{Ask, History};

/// A rendered list; `ends[k]` is the length of its first k items, commas between them included.
struct Items {
    text: Vec<u8>,
    ends: Vec<usize>,
}

impl Items {
    fn new() -> Items {
        Items { text: Vec::new(), ends: vec![0] }
    }

    fn push(&mut self, item: std::fmt::Arguments) {
        if !self.text.is_empty() {
            self.text.push(b',');
        }
        self.text.write_fmt(item).unwrap();
        self.ends.push(self.text.len());
    }

    /// Items `from..to`, joined.
    fn slice(&self, from: usize, to: usize) -> &[u8] {
        let comma = usize::from(from > 0 && from < to);
        &self.text[self.ends[from] + comma..self.ends[to]]
    }
}

/// The tokens of an answer and their logprobs, rendered once and shared by all requests that ask for the same.
pub struct Answer {
    ids: Items,
    logprobs: Items,
}

impl Answer {
    pub fn new(mut history: History, count: usize) -> Answer {
        let (mut ids, mut logprobs) = (Items::new(), Items::new());
        for _ in 0..count {
            let token = history.next();
            ids.push(format_args!("{token}"));
            logprobs.push(format_args!("[{},{token},null]", history.logprob()));
            history.push(token);
        }
        Answer { ids, logprobs }
    }

    /// Append the JSON object that shows tokens `from..to` of the answer to `ask`.
    pub fn object(&self, ask: &Ask, rid: &str, version: &str, from: usize, to: usize, out: &mut Vec<u8>) {
        let total = ask.max_new_tokens;
        out.extend_from_slice(b"{\"output_ids\":[");
        out.extend_from_slice(self.ids.slice(from, to));
        write!(out, "],\"meta_info\":{{\"id\":\"{rid}\",\"finish_reason\":").unwrap();
        if to == total {
            write!(out, "{{\"type\":\"length\",\"length\":{total}}}").unwrap();
        } else {
            out.extend_from_slice(b"null");
        }
        let prompt = ask.prompt.len();
        write!(out, ",\"prompt_tokens\":{prompt},\"weight_version\":\"{version}\",\"num_retractions\":0,").unwrap();
        if ask.logprobs {
            out.extend_from_slice(b"\"input_token_logprobs\":[],\"output_token_logprobs\":[");
            out.extend_from_slice(self.logprobs.slice(from, to));
            write!(out, "],\"output_token_logprobs_length\":{to},").unwrap();
        }
        write!(out, "\"reasoning_tokens\":0,\"completion_tokens\":{to},\"cached_tokens\":0,").unwrap();
        if to == total {
            write!(out, "\"weight_versions\":[{{\"version\":\"{version}\",\"start\":0,\"end\":{total}}}],").unwrap();
        }
        out.extend_from_slice(b"\"cached_tokens_details\":null,\"dp_rank\":null,");
        if to == total {
            out.extend_from_slice(b"\"e2e_latency\":1.2345678900001535,");
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        write!(out, "\"response_sent_to_client_ts\":{}.{:09}}}}}", now.as_secs(), now.subsec_nanos()).unwrap();
    }
}

const HEAD: &str = "HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 15:33:28 GMT\r\nserver: uvicorn\r\n";

pub fn stream_head(out: &mut Vec<u8>) {
    write!(
        out,
        "{HEAD}content-type: text/event-stream; charset=utf-8\r\nvary: Origin\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    .unwrap();
}

/// One event in a chunk of its own, as uvicorn writes it.
pub fn chunked_event(data: &[u8], out: &mut Vec<u8>) {
    write!(out, "{:x}\r\ndata: ", data.len() + 8).unwrap();
    out.extend_from_slice(data);
    out.extend_from_slice(b"\n\n\r\n");
}

pub fn stream_end(out: &mut Vec<u8>) {
    chunked_event(b"[DONE]", out);
    out.extend_from_slice(b"0\r\n\r\n");
}

pub fn json(body: &[u8], out: &mut Vec<u8>) {
    write!(out, "{HEAD}content-length: {}\r\ncontent-type: application/json\r\nvary: Origin\r\n\r\n", body.len())
        .unwrap();
    out.extend_from_slice(body);
}

pub fn not_found(out: &mut Vec<u8>) {
    let body = "{\"detail\":\"Not Found\"}";
    write!(
        out,
        "HTTP/1.1 404 Not Found\r\ncontent-length: {}\r\ncontent-type: application/json\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
}
