//! Is this the answer that the engine gives? Every token of every benchmark answer passes here.

use crate::engine::{answer, number, numbers, value, Ask};
use crate::http::find;

/// What a whole answer must hold.
pub struct Expected {
    prompt: usize,
    tokens: Vec<u32>,
}

/// How much of one answer has been seen.
#[derive(Default)]
pub struct Progress {
    /// Bytes of the body that have been checked.
    checked: usize,
    tokens: usize,
    finished: bool,
    done: bool,
}

impl Progress {
    /// Drop what has been checked from `body`: nobody could hold all of thousands of long streams.
    pub fn forget(&mut self, body: &mut Vec<u8>) {
        body.drain(..self.checked);
        self.checked = 0;
    }
}

impl Expected {
    pub fn new(body: &[u8]) -> Expected {
        let ask = Ask::parse(body);
        Expected { prompt: ask.prompt.len(), tokens: answer(&ask.prompt, ask.max_new_tokens) }
    }

    /// Check the events that `body` has gained; call `seen` with each one's JSON. Err: what is wrong.
    pub fn events(&self, body: &[u8], progress: &mut Progress, mut seen: impl FnMut(&[u8])) -> Result<(), String> {
        while let Some(length) = find(&body[progress.checked..], b"\n\n") {
            let event = &body[progress.checked..progress.checked + length];
            progress.checked += length + 2;
            if event.starts_with(b":") {
                continue;
            }
            let data = event.strip_prefix(b"data: ").ok_or("an event without data")?;
            if progress.done {
                return Err("an event after [DONE]".into());
            }
            if data == b"[DONE]" {
                progress.done = true;
                continue;
            }
            self.object(data, progress)?;
            seen(data);
        }
        Ok(())
    }

    /// Check one JSON object: an event that repeats all tokens so far, one that holds the next tokens, a whole answer.
    pub fn object(&self, json: &[u8], progress: &mut Progress) -> Result<(), String> {
        let ids = find(json, b"\"output_ids\":").ok_or("no output_ids")?;
        let (ids, _) = numbers(&json[ids + b"\"output_ids\":".len()..]);
        let to = number(json, "completion_tokens").ok_or("no completion_tokens")?;
        let from = if ids.len() == to { 0 } else { progress.tokens };
        if progress.finished || from + ids.len() != to || to <= progress.tokens {
            return Err(format!("{} tokens after {}, said to be {to}", ids.len(), progress.tokens));
        }
        if self.tokens.get(from..to) != Some(&ids) {
            return Err(format!("other tokens in {from}..{to}"));
        }
        progress.tokens = to;
        progress.finished = value(json, "finish_reason").is_some_and(|text| !text.starts_with(b"null"));
        if progress.finished && (number(json, "length"), number(json, "prompt_tokens")) != (Some(to), Some(self.prompt))
        {
            return Err("a wrong length or prompt_tokens at the end".into());
        }
        Ok(())
    }

    /// Is the answer whole? `events`: it came as a stream.
    pub fn whole(&self, progress: &Progress, events: bool) -> Result<(), String> {
        if progress.tokens == self.tokens.len() && progress.finished && progress.done == events {
            return Ok(());
        }
        Err(format!("ends at token {} of {}", progress.tokens, self.tokens.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &[u8] = br#"{"input_ids":[5,6,7],"sampling_params":{"max_new_tokens":4},"stream":true}"#;

    /// The event that shows `tokens`, `to` of them delivered.
    fn event(tokens: &[u32], to: usize) -> String {
        let finish = if to == 4 { r#"{"type":"length","length":4}"# } else { "null" };
        format!("data: {{\"output_ids\":{tokens:?},\"meta_info\":{{\"finish_reason\":{finish},\"prompt_tokens\":3,\"completion_tokens\":{to}}}}}\n\n")
    }

    fn judge(stream: &str) -> Result<(), String> {
        let (expected, mut progress) = (Expected::new(BODY), Progress::default());
        expected.events(stream.as_bytes(), &mut progress, |_| ())?;
        expected.whole(&progress, true)
    }

    #[test]
    fn both_dialects_pass() {
        let t = answer(&[5, 6, 7], 4);
        let incremental = [event(&t[..1], 1), event(&t[1..2], 2), event(&t[2..], 4)].concat() + "data: [DONE]\n\n";
        let cumulative = [event(&t[..1], 1), event(&t[..3], 3), event(&t, 4)].concat() + "data: [DONE]\n\n";
        assert_eq!((judge(&incremental), judge(&cumulative)), (Ok(()), Ok(())));
    }

    #[test]
    fn what_is_not_the_answer_fails() {
        let t = answer(&[5, 6, 7], 4);
        let whole = [event(&t[..2], 2), event(&t[2..], 4)];
        assert!(judge(&whole.concat()).is_err(), "no [DONE]");
        assert!(judge(&(whole[0].clone() + "data: [DONE]\n\n")).is_err(), "ends early");
        assert!(judge(&(whole[1].clone() + "data: [DONE]\n\n")).is_err(), "an event lost");
        assert!(judge(&(whole[0].clone() + &whole.concat() + "data: [DONE]\n\n")).is_err(), "an event twice");
        assert!(judge(&(event(&[1, 2, 3, 4], 4) + "data: [DONE]\n\n")).is_err(), "other tokens");
    }
}
