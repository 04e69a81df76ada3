//! The engine that the mock worker plays and the load generator checks.
//!
//! The next token is a function of every token before it, prompt and answer alike. So a continuation on another worker,
//! with "prompt + delivered tokens" as its prompt, goes on with exactly the tokens of the uninterrupted run, and one
//! token lost, doubled or changed on the way changes everything after it.

use crate::http::{find, find_last};

const MULTIPLIER: u64 = 0x9E37_79B9_7F4A_7C15;
const VOCABULARY: u64 = 150_000;
/// Stock's default when a request names no budget.
const DEFAULT_MAX_NEW_TOKENS: usize = 128;

/// Spread the bits of `x`; also the source of every "random" choice here.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^ (x >> 32)
}

/// All tokens so far, as one number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct History(u64);

impl History {
    pub fn of(tokens: &[u32]) -> History {
        let mut history = History(0);
        tokens.iter().for_each(|token| history.push(*token));
        history
    }

    pub fn push(&mut self, token: u32) {
        self.0 = mix((self.0 ^ u64::from(token)).wrapping_mul(MULTIPLIER));
    }

    /// The token that follows.
    pub fn next(&self) -> u32 {
        100 + (mix(self.0 ^ MULTIPLIER) % VOCABULARY) as u32
    }

    /// Its log probability: mostly near zero, and as long in print as a 32-bit float widened to 64 bits.
    pub fn logprob(&self) -> f64 {
        let unit = (mix(self.0 ^ 0x5555) % 1_000_000) as f32 / 1_000_000.0;
        f64::from(-unit.powi(3) * 6.0 - 1e-4)
    }
}

/// The tokens after `prompt`, `count` of them.
pub fn answer(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut history = History::of(prompt);
    let mut tokens = Vec::with_capacity(count);
    for _ in 0..count {
        tokens.push(history.next());
        history.push(history.next());
    }
    tokens
}

/// What a `/generate` body asks for.
pub struct Ask {
    pub prompt: Vec<u32>,
    pub max_new_tokens: usize,
    pub stream: bool,
    pub stream_interval: usize,
    pub logprobs: bool,
    pub rid: Option<String>,
}

impl Ask {
    pub fn parse(body: &[u8]) -> Ask {
        Ask {
            prompt: value(body, "input_ids").map_or(Vec::new(), |text| numbers(text).0),
            max_new_tokens: number(body, "max_new_tokens").unwrap_or(DEFAULT_MAX_NEW_TOKENS),
            stream: truth(body, "stream"),
            stream_interval: number(body, "stream_interval").unwrap_or(1).max(1),
            logprobs: truth(body, "return_logprob"),
            rid: value(body, "rid").and_then(string),
        }
    }
}

/// The text that begins with the value of the last `"key":` in `json`. Enough for bodies whose strings hold no keys.
pub fn value<'a>(json: &'a [u8], key: &str) -> Option<&'a [u8]> {
    let quoted = format!("\"{key}\"");
    let rest = json[find_last(json, quoted.as_bytes())? + quoted.len()..].trim_ascii_start();
    Some(rest.strip_prefix(b":")?.trim_ascii_start())
}

pub fn number(json: &[u8], key: &str) -> Option<usize> {
    let text = value(json, key)?;
    let digits = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    std::str::from_utf8(&text[..digits]).unwrap().parse().ok()
}

fn truth(json: &[u8], key: &str) -> bool {
    value(json, key).is_some_and(|text| text.starts_with(b"true"))
}

fn string(text: &[u8]) -> Option<String> {
    let text = text.strip_prefix(b"\"")?;
    Some(String::from_utf8_lossy(&text[..find(text, b"\"")?]).into_owned())
}

/// The numbers of the JSON array that `text` begins with, and how many bytes it takes. Panics on other things in it.
pub fn numbers(text: &[u8]) -> (Vec<u32>, usize) {
    let mut list = Vec::new();
    let mut current = None;
    for (at, byte) in text.iter().enumerate() {
        match byte {
            b'0'..=b'9' => current = Some(current.unwrap_or(0) * 10 + u32::from(byte - b'0')),
            b',' | b']' => list.extend(current.take()),
            b'[' | b' ' => {}
            other => panic!("token ids hold {:?}", *other as char),
        }
        if *byte == b']' {
            return (list, at + 1);
        }
    }
    panic!("token ids without an end")
}
