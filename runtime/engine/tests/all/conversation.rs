//! Conversations over a model that answers by what is in its context: a context that is not what the template
//! rendered gives a wrong answer.

use crate::common;
use std::convert::Infallible;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;

use mlcc_engine::conversation::{AnswerSettings, ChatFormat, Conversation, ConversationError, TurnResult};
use mlcc_engine::{FinishReason, LanguageModel, LocalMachine, RewindModel, SamplingParams};
use mlcc_text::chat::BuiltinFormat;
use mlcc_text::{ChatTemplate, SpecialTokens, TokenId, Tokenizer};

/// Continues `Assistant:` with the answer number of users in the context; counts the tokens that it computes.
struct CountingParrot {
    tokenizer: Tokenizer,
    context: Vec<TokenId>,
    recurrent: bool,
    whole: bool,
    fed: usize,
    logits: Vec<f32>,
}

const ANSWERS: [&str; 3] = [" One.", " Two words.", " Third."];
const END: &str = "\n\nUser:";

impl CountingParrot {
    fn new(recurrent: bool) -> Self {
        let tokenizer = common::world(&[b"Assistant", b"User", b"\n\n", b".\n\n", b" w", b"ords"]);
        let logits = vec![0.0; tokenizer.vocab_size()];
        CountingParrot { tokenizer, context: vec![], recurrent, whole: false, fed: 0, logits }
    }

    fn look(&mut self) {
        let text = self.tokenizer.decode(&self.context, SpecialTokens::Keep);
        let (before, said) = text.rsplit_once("Assistant:").unwrap_or(("", ""));
        let answer = ANSWERS[before.matches("User:").count().clamp(1, 3) - 1].to_owned() + END;
        let rest = answer.strip_prefix(said).unwrap_or("?");
        let next = self.tokenizer.encode(rest).unwrap()[0];
        self.logits.fill(0.0);
        self.logits[next as usize] = 1.0;
    }
}

impl LanguageModel for CountingParrot {
    type Error = Infallible;

    fn prefill(&mut self, tokens: &[TokenId]) -> Result<&[f32], Infallible> {
        self.context.extend_from_slice(tokens);
        self.fed += tokens.len();
        self.look();
        Ok(&self.logits)
    }

    fn decode(&mut self, token: TokenId) -> Result<&[f32], Infallible> {
        self.prefill(&[token])
    }

    fn reset(&mut self) -> Result<(), Infallible> {
        self.context.clear();
        Ok(())
    }

    fn past(&self) -> usize {
        self.context.len()
    }

    fn vocab(&self) -> usize {
        self.logits.len()
    }

    fn context(&self) -> Option<usize> {
        None
    }

    fn needs_whole_prompts(&self) -> bool {
        self.whole
    }
}

impl RewindModel for CountingParrot {
    type Snapshot = Vec<TokenId>;

    fn can_truncate(&self) -> bool {
        !self.recurrent
    }

    fn can_truncate_to(&self, past: usize) -> bool {
        past == 0 || !self.recurrent && past <= self.context.len()
    }

    fn truncate(&mut self, past: usize) -> Result<(), Infallible> {
        assert!(!self.recurrent && past <= self.context.len());
        self.context.truncate(past);
        Ok(())
    }

    fn snapshot(&self) -> Result<Vec<TokenId>, Infallible> {
        Ok(self.context.clone())
    }

    fn restore(&mut self, snapshot: &Vec<TokenId>) -> Result<(), Infallible> {
        self.context = snapshot.clone();
        Ok(())
    }
}

const GREEDY: fn() -> SamplingParams = SamplingParams::greedy;

fn settings(sampling: &SamplingParams) -> AnswerSettings<'_> {
    AnswerSettings { sampling, max_tokens: Some(40), eos: &[], stop: &[], form: None, cancel: None }
}

fn world_chat(recurrent: bool) -> (Conversation<CountingParrot>, Tokenizer) {
    let tokenizer = CountingParrot::new(false).tokenizer;
    let format = ChatFormat::Template(Box::new(ChatTemplate::builtin(BuiltinFormat::RwkvWorld)));
    (Conversation::new(CountingParrot::new(recurrent), format, None, &tokenizer), tokenizer)
}

fn say(chat: &mut Conversation<CountingParrot>, tokenizer: &Tokenizer, text: &str) -> (String, TurnResult) {
    let mut out = String::new();
    let turn = chat.send_message(tokenizer, text, &settings(&GREEDY()), |piece| {
        out.push_str(piece);
        ControlFlow::Continue(())
    });
    (out, turn.unwrap())
}

#[test]
fn later_turns_read_only_what_is_new() {
    for recurrent in [false, true] {
        let (mut chat, tokenizer) = world_chat(recurrent);
        let (answer, first) = say(&mut chat, &tokenizer, "Hello");
        assert_eq!((answer.as_str(), first.reused_tokens), (ANSWERS[0], 0));
        assert_eq!(first.generation.finish, FinishReason::Stop(0));
        let context = chat.context_tokens();
        let (answer, second) = say(&mut chat, &tokenizer, "More");
        assert_eq!(answer, ANSWERS[1]);
        // A recurrent model goes on from all it has read; the other may drop a token whose text went on
        // otherwise.
        assert!(second.reused_tokens + 3 >= context, "{second:?}");
        assert!(second.prompt_tokens - second.reused_tokens < 20, "{second:?}");
        let (answer, _) = say(&mut chat, &tokenizer, "Again");
        assert_eq!(answer, ANSWERS[2]);
        assert_eq!(chat.messages().len(), 6);
        assert_eq!(chat.messages()[3].text(), ANSWERS[1]);
    }
}

#[test]
fn prefix_models_read_everything_again() {
    let tokenizer = CountingParrot::new(false).tokenizer;
    let format = ChatFormat::Template(Box::new(ChatTemplate::builtin(BuiltinFormat::RwkvWorld)));
    let model = CountingParrot { whole: true, ..CountingParrot::new(false) };
    let mut chat = Conversation::new(model, format, None, &tokenizer);
    for (text, answer) in [("Hello", ANSWERS[0]), ("More", ANSWERS[1])] {
        let (said, turn) = say(&mut chat, &tokenizer, text);
        assert_eq!((said.as_str(), turn.reused_tokens), (answer, 0));
    }
}

#[test]
fn an_answer_can_be_made_again() {
    for recurrent in [false, true] {
        let (mut chat, tokenizer) = world_chat(recurrent);
        let refused = chat.regenerate(&tokenizer, &settings(&GREEDY()), |_| ControlFlow::Continue(()));
        assert!(matches!(refused, Err(ConversationError::NothingToRegenerate)));
        say(&mut chat, &tokenizer, "Hello");
        let (answer, turn) = say(&mut chat, &tokenizer, "More");
        let read = chat.model().fed;
        for _ in 0..2 {
            let mut again = String::new();
            let turn_again = chat
                .regenerate(&tokenizer, &settings(&GREEDY()), |piece| {
                    again.push_str(piece);
                    ControlFlow::Continue(())
                })
                .unwrap();
            assert_eq!(again, answer);
            assert_eq!(turn_again.reused_tokens, turn.reused_tokens, "the turn is read as before");
        }
        assert_eq!(chat.messages().len(), 4);
        assert!(chat.model().fed - read < 2 * 60, "only the last turn is read again");
        let (answer, _) = say(&mut chat, &tokenizer, "Again");
        assert_eq!(answer, ANSWERS[2]);
    }
}

#[test]
fn cancelled_turns_leave_a_usable_conversation() {
    for recurrent in [false, true] {
        let (mut chat, tokenizer) = world_chat(recurrent);
        say(&mut chat, &tokenizer, "Hello");
        let (sampling, cancel) = (GREEDY(), AtomicBool::new(true));
        let cancelled = AnswerSettings { cancel: Some(&cancel), ..settings(&sampling) };
        let turn = chat.send_message(&tokenizer, "Lost", &cancelled, |_| ControlFlow::Continue(())).unwrap();
        assert_eq!((turn.generation.finish, chat.messages().len()), (FinishReason::Cancelled, 2));
        // Stopped in the middle of the answer: what was said stays.
        let mut out = String::new();
        let turn = chat.send_message(&tokenizer, "More", &settings(&sampling), |piece| {
            out.push_str(piece);
            if out.ends_with("Tw") { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert_eq!(turn.unwrap().generation.finish, FinishReason::Cancelled);
        assert_eq!(chat.messages()[3].text(), " Tw");
        let (answer, _) = say(&mut chat, &tokenizer, "Again");
        assert_eq!(answer, ANSWERS[2]);
        chat.reset().unwrap();
        assert_eq!((chat.messages().len(), chat.context_tokens()), (0, 0));
        assert_eq!(say(&mut chat, &tokenizer, "Hello").0, ANSWERS[0]);
    }
}

#[test]
fn plain_format_goes_on_with_the_text() {
    for recurrent in [false, true] {
        let tokenizer = CountingParrot::new(false).tokenizer;
        let mut chat = Conversation::new(CountingParrot::new(recurrent), ChatFormat::Plain, None, &tokenizer);
        let sampling = GREEDY();
        let stop = [".".to_string()];
        let plain = AnswerSettings { stop: &stop, ..settings(&sampling) };
        let mut out = String::new();
        let mut turn = |text: &str, out: &mut String| {
            let show = |piece: &str| {
                out.push_str(piece);
                ControlFlow::Continue(())
            };
            chat.send_message(&tokenizer, text, &plain, show).unwrap()
        };
        turn("User: a\n\nAssistant:", &mut out);
        assert_eq!(out, " One");
        let second = turn(".\n\nUser: b\n\nAssistant:", &mut out);
        assert_eq!(out, " One Two words");
        assert!(second.reused_tokens > 10, "{second:?}");
    }
}

/// A template's own end of answers is found, and refused conversations change nothing.
#[test]
fn templates_say_how_answers_end() {
    let tokenizer = common::sentencepiece();
    let template = "{% for m in messages %}{% if m.content == 'a' %}{{ raise_exception('no a') }}{% endif %}\
                    {% if m.role == 'assistant' %} {{ m.content }} </s>{% else %}[{{ m.content }}]{% endif %}{% endfor %}";
    let format =
        || ChatFormat::Template(Box::new(ChatTemplate::from_jinja(template, &LocalMachine).unwrap()));
    let mut chat = Conversation::new(CountingParrot::new(false), format(), None, &tokenizer);
    assert_eq!(chat.end_tokens(), [2]);
    chat.reset().unwrap();
    let mut refusing = Conversation::new(CountingParrot::new(false), format(), Some("Be brief."), &tokenizer);
    let error = refusing.send_message(&tokenizer, "a", &settings(&GREEDY()), |_| ControlFlow::Continue(()));
    assert!(error.is_err_and(|e| e.to_string().contains("no a")));
    assert_eq!(refusing.messages().len(), 1, "only the system's message");
}
