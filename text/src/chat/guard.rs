//! Stop strings are for the text of an answer: this tells it from reasoning, calls in channels and markers,
//! as it comes.

use super::answer::{Match, matches};
use super::channels::{ChannelSyntax, MessageKind};
use super::syntax::{AnswerSyntax, ReasoningSyntax};
use super::tags::open_end;

/// Takes a text apart into what is looked at for stop strings and what is not.
#[derive(Debug, Clone)]
pub struct StopGuard {
    form: GuardForm,
    place: GuardState,
    /// Text that may become a marker.
    held: String,
}

#[derive(Debug, Clone)]
enum GuardForm {
    Reasoning(ReasoningSyntax),
    Channels(Box<ChannelSyntax>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GuardState {
    /// Nothing is known yet.
    Begin,
    Reasoning,
    /// Blanks before the text.
    Blank,
    Text,
    /// The head of a message; `first` if it has no role.
    Head {
        first: bool,
    },
    Body {
        watched: bool,
    },
}

impl AnswerSyntax {
    /// The guard of an answer that goes on from `prompt`; none where all of it is text.
    pub fn stop_guard(&self, prompt: &str) -> Option<StopGuard> {
        if let Some(channels) = self.channels.as_ref().filter(|channels| channels.is_answered(prompt)) {
            let form = GuardForm::Channels(Box::new(channels.clone()));
            let mut guard = StopGuard { form, place: GuardState::Head { first: true }, held: String::new() };
            guard.split(channels.started_answer(prompt), &mut |_, _| {});
            guard.held.clear();
            return Some(guard);
        }
        let reasoning = self.reasoning.clone()?;
        let place = if reasoning.is_open_behind(prompt) { GuardState::Reasoning } else { GuardState::Begin };
        let closed = prompt.trim_end().ends_with(reasoning.close.trim());
        let form = GuardForm::Reasoning(reasoning);
        (!closed).then_some(StopGuard { form, place, held: String::new() })
    }
}

impl StopGuard {
    /// True if everything that comes is text.
    pub fn is_done(&self) -> bool {
        self.place == GuardState::Text && self.held.is_empty()
    }

    /// Gives the text on in order, in parts, and of each whether stop strings are looked for in it.
    pub fn split(&mut self, piece: &str, each: &mut dyn FnMut(&str, bool)) {
        self.held.push_str(piece);
        loop {
            let before = self.place;
            let given = self.step(each);
            self.held.drain(..given);
            if self.held.is_empty() || given == 0 && self.place == before {
                break;
            }
        }
    }

    /// The text has ended: what was held back.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Gives on what is known of what is held; its bytes.
    fn step(&mut self, each: &mut dyn FnMut(&str, bool)) -> usize {
        let all = self.held.len();
        match (&self.form, self.place) {
            (GuardForm::Reasoning(reasoning), GuardState::Begin) => {
                match matches(reasoning.open.trim(), &self.held) {
                    Match::Partial => 0,
                    Match::Full(end) => {
                        each(&self.held[..end], false);
                        self.place = GuardState::Reasoning;
                        end
                    }
                    Match::No => {
                        self.place = GuardState::Text;
                        0
                    }
                }
            }
            (GuardForm::Reasoning(reasoning), GuardState::Reasoning) => {
                let close = reasoning.close.trim();
                let found = self.held.find(close).map(|at| at + close.len());
                let end = found.unwrap_or(all - open_end(&self.held, close));
                each(&self.held[..end], false);
                if found.is_some() {
                    self.place = GuardState::Blank;
                }
                end
            }
            (_, GuardState::Blank) => {
                let blanks = all - self.held.trim_start().len();
                each(&self.held[..blanks], false);
                if blanks < all {
                    self.place = match self.form {
                        GuardForm::Reasoning(_) => GuardState::Text,
                        GuardForm::Channels(_) => GuardState::Body { watched: true },
                    };
                }
                blanks
            }
            (GuardForm::Channels(channels), GuardState::Head { first }) => {
                let message = &channels.message;
                let Some(at) = self.held.find(message.as_str()) else {
                    if first && !channels.may_be_head(&self.held) {
                        self.place = GuardState::Body { watched: true };
                    }
                    return 0;
                };
                let (kind, _) = channels.read_head(&self.held[..at], first);
                let end = at + message.len();
                each(&self.held[..end], false);
                self.place = if kind == MessageKind::Text {
                    GuardState::Blank
                } else {
                    GuardState::Body { watched: false }
                };
                end
            }
            (GuardForm::Channels(channels), GuardState::Body { watched }) => {
                match channels.message_end(&self.held) {
                    Some((at, end, next)) => {
                        each(&self.held[..at], watched);
                        each(&self.held[at..end], false);
                        // Behind an end comes the marker of the next begin, which ends an empty message.
                        self.place = match next {
                            Some(has_role) => GuardState::Head { first: !has_role },
                            None => GuardState::Body { watched: false },
                        };
                        end
                    }
                    None => {
                        let end = all - channels.open_marker(&self.held);
                        each(&self.held[..end], watched);
                        end
                    }
                }
            }
            _ => {
                each(&self.held, true);
                all
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::{CallerHost, ChatTemplate};

    const THINKS: &str = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content or '' }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
    const HARMONY: &str = include_str!("../../tests/data/harmony.jinja");

    /// The parts that are watched, in brackets.
    fn shown(template: &str, prompt: &str, pieces: &[&str]) -> String {
        let syntax = AnswerSyntax::from_template(&ChatTemplate::from_jinja(template, &CallerHost).unwrap());
        let mut guard = syntax.stop_guard(prompt).unwrap();
        let mut shown = String::new();
        for piece in pieces {
            guard.split(piece, &mut |text, watched| {
                for c in text.chars() {
                    shown.extend(watched.then_some('_'));
                    shown.push(c);
                }
            });
        }
        shown + &guard.finish()
    }

    #[test]
    fn only_the_text_of_an_answer_is_watched() {
        let (user, open) = ("<|user|>Q<|end|><|assistant|>", "<|start|>assistant");
        for (template, prompt, text, wanted) in [
            (THINKS, user, "<think>a\n\nb</think>\n\nc\n", "<think>a\n\nb</think>\n\n_c_\n"),
            (THINKS, "<think>\n", "a</b></think>c", "a</b></think>_c"),
            (THINKS, user, "<b>", "_<_b_>"),
            (THINKS, user, "\n\n<thin", "\n\n<thin"),
            (
                HARMONY,
                open,
                "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<",
                "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>_b<",
            ),
            (
                HARMONY,
                open,
                "<|channel|>commentary<|message|>x<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>y<|call|>",
                "<|channel|>commentary<|message|>_x<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>y<|call|>",
            ),
            (HARMONY, open, "plain", "_p_l_a_i_n"),
        ] {
            assert_eq!(shown(template, prompt, &[text]), wanted);
            let single: Vec<String> = text.chars().map(String::from).collect();
            let single: Vec<&str> = single.iter().map(String::as_str).collect();
            assert_eq!(shown(template, prompt, &single), wanted, "one by one");
        }
    }
}
