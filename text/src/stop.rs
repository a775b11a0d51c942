//! Stop strings: where a text has to end, though the model would go on.
//!
//! The text comes in pieces of any size. Text that may be the start of a stop string is held back until it is
//! known not to be one. Invariant: the emitted text does not depend on how the text was cut into pieces; the
//! stop string that is complete first wins (of several that end at the same place, the longest).

use thiserror::Error;

use crate::chat::StopGuard;

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("stop string number {index} is empty, which would end every text immediately: leave it out")]
pub struct EmptyStop {
    pub index: usize,
}

#[derive(Debug, Clone, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    /// Bytes at the start of `held` that the last call gave out.
    emitted_len: usize,
    /// Bytes at the start of `held` that no stop string ends in.
    unmatched_len: usize,
    /// Selects the parts of the text that are looked at; none where all are.
    guard: Option<Box<StopGuard>>,
}

/// The result of one piece.
#[derive(Debug, PartialEq, Eq)]
pub struct StopCheck<'a> {
    /// Text that is safe to show (maybe none).
    pub text: &'a str,
    /// The stop string that ended the text, by its number; nothing may follow.
    pub stop: Option<usize>,
}

impl StopMatcher {
    pub fn new(stops: &[String]) -> Result<Self, EmptyStop> {
        match stops.iter().position(String::is_empty) {
            Some(index) => Err(EmptyStop { index }),
            None => Ok(StopMatcher { stops: stops.to_vec(), ..StopMatcher::default() }),
        }
    }

    /// Looks at the parts alone that the guard lets it.
    pub fn guarded(stops: &[String], guard: Option<StopGuard>) -> Result<Self, EmptyStop> {
        let guard = guard.filter(|_| !stops.is_empty()).map(Box::new);
        Ok(StopMatcher { guard, ..StopMatcher::new(stops)? })
    }

    pub fn push(&mut self, piece: &str) -> StopCheck<'_> {
        self.held.drain(..self.emitted_len);
        self.unmatched_len -= self.emitted_len.min(self.unmatched_len);
        self.emitted_len = 0;
        let found = match self.guard.take() {
            None => {
                self.held.push_str(piece);
                self.first_match()
            }
            Some(guard) => self.push_guarded(guard, piece),
        };
        if let Some((start, index)) = found {
            self.held.truncate(start);
            self.emitted_len = start;
            return StopCheck { text: &self.held, stop: Some(index) };
        }
        self.emitted_len = self.held.len() - self.open_suffix();
        StopCheck { text: &self.held[..self.emitted_len], stop: None }
    }

    fn push_guarded(&mut self, mut guard: Box<StopGuard>, piece: &str) -> Option<(usize, usize)> {
        let mut found = None;
        guard.split(piece, &mut |text, watched| {
            if found.is_none() {
                self.held.push_str(text);
                match watched {
                    true => found = self.first_match(),
                    false => self.unmatched_len = self.held.len(),
                }
            }
        });
        if !guard.is_done() {
            self.guard = Some(guard);
        }
        found
    }

    /// The text has ended: gives out what was held back.
    pub fn finish(&mut self) -> &str {
        self.held.drain(..self.emitted_len);
        if let Some(mut guard) = self.guard.take() {
            self.held.push_str(&guard.finish());
        }
        self.emitted_len = self.held.len();
        &self.held
    }

    /// Begin and number of the stop string that is complete first.
    fn first_match(&self) -> Option<(usize, usize)> {
        let matches = self.stops.iter().enumerate().filter_map(|(index, stop)| {
            Some((self.unmatched_len + self.held[self.unmatched_len..].find(stop.as_str())?, index))
        });
        matches.min_by_key(|&(start, index)| (start + self.stops[index].len(), start, index))
    }

    /// Length of the longest suffix of the held text that a stop string begins with.
    fn open_suffix(&self) -> usize {
        let watched = &self.held[self.unmatched_len..];
        self.stops.iter().map(|stop| open_suffix(watched, stop)).max().unwrap_or(0)
    }
}

fn open_suffix(text: &str, stop: &str) -> usize {
    let longest = (stop.len() - 1).min(text.len());
    let suffix = |len: &usize| text.as_bytes().ends_with(&stop.as_bytes()[..*len]);
    // A prefix of `stop` that ends inside a character cannot end a text, so the split is at a character
    // boundary.
    (1..=longest).rev().filter(|&len| stop.is_char_boundary(len)).find(suffix).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(&stops.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    fn run<'a>(stops: &[&str], pieces: impl IntoIterator<Item = &'a str>) -> (String, Option<usize>) {
        let mut matcher = matcher(stops);
        let mut text = String::new();
        for piece in pieces {
            let passed = matcher.push(piece);
            text.push_str(passed.text);
            if passed.stop.is_some() {
                return (text, passed.stop);
            }
        }
        text.push_str(matcher.finish());
        (text, None)
    }

    #[test]
    fn holds_back_what_may_be_a_stop() {
        let mut m = matcher(&["\nUser:"]);
        assert_eq!(m.push("Hello\n"), StopCheck { text: "Hello", stop: None });
        assert_eq!(m.push("Us"), StopCheck { text: "", stop: None });
        assert_eq!(m.push("eful\nUser"), StopCheck { text: "\nUseful", stop: None });
        assert_eq!(m.push(": hi"), StopCheck { text: "", stop: Some(0) });
        let mut m = matcher(&["\nUser:"]);
        assert_eq!(m.push("a\nUse"), StopCheck { text: "a", stop: None });
        assert_eq!(m.finish(), "\nUse");
        assert_eq!(m.finish(), "");
    }

    #[test]
    fn first_complete_stop_wins() {
        assert_eq!(run(&["abc", "b"], ["abc"]), (String::from("a"), Some(1)));
        assert_eq!(run(&["b", "ab"], ["xab"]), (String::from("x"), Some(1)));
        assert_eq!(run(&[], ["abc"]), (String::from("abc"), None));
        assert_eq!(run(&["é!"], ["caf", "é", "é!"]), (String::from("café"), Some(0)));
        assert_eq!(StopMatcher::new(&["x".into(), String::new()]).unwrap_err(), EmptyStop { index: 1 });
    }

    /// The definition: the shortest prefix of the text that ends with a stop string.
    fn reference(stops: &[&str], text: &str) -> (String, bool) {
        for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let longest =
                stops.iter().filter(|stop| text[..end].ends_with(**stop)).map(|stop| stop.len()).max();
            if let Some(len) = longest {
                return (text[..end - len].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(text in "[abé]{0,24}", stops in proptest::collection::vec("[abé]{1,4}", 0..4), cuts in proptest::collection::vec(1usize..5, 24)) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let chars: Vec<char> = text.chars().collect();
            let mut pieces: Vec<String> = Vec::new();
            let mut rest = &chars[..];
            for cut in cuts {
                let (piece, tail) = rest.split_at(cut.min(rest.len()));
                pieces.push(piece.iter().collect());
                rest = tail;
            }
            let (expected, stopped) = reference(&stops, &text);
            for (got, stop) in [run(&stops, pieces.iter().map(String::as_str)), run(&stops, [text.as_str()])] {
                prop_assert_eq!(&got, &expected);
                prop_assert_eq!(stop.is_some(), stopped);
            }
        }
    }
}
