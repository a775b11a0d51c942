//! A server over the toy model of the tests, to try clients without a compiled model:
//! `cargo run -p mlcc-serve --example toy`. Its texts mean nothing; calls of tools and JSON have their form
//! from grammars. It prints its address, and ends with its standard input. An argument is the time of a step
//! in milliseconds, for tests that look at an answer on its way.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mlcc_engine::conversation::ChatFormat;
use mlcc_engine::serving::{ModelLimits, ModelRunner, RunnerError, SequenceInput};
use mlcc_engine::{LocalMachine, SamplingParams};
use mlcc_serve::{ModelSetup, NoLibrary, ReadyModel, ServeOptions, serve};
use mlcc_text::ChatTemplate;

#[allow(dead_code, reason = "the engine's tests use all of it")]
#[path = "../../engine/tests/all/toy/mod.rs"]
mod toy;
#[allow(dead_code, reason = "the tests of tokenizers use all of it")]
#[path = "../../../text/tests/all/vocabularies.rs"]
mod vocabularies;

const TEMPLATE: &str = "{% if tools %}[tools {{ tools | tojson }}]{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first else '' }}<call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}";

/// The toy with a time for each step.
struct PacedToy {
    toy: toy::ToyModel,
    step: Duration,
}

impl ModelRunner for PacedToy {
    type Sequence = toy::ToySequence;

    fn limits(&self) -> ModelLimits {
        self.toy.limits()
    }

    fn new_sequence(&self) -> Result<Self::Sequence, RunnerError<Self>> {
        self.toy.new_sequence()
    }

    fn fork(&self, sequence: &Self::Sequence) -> Result<Self::Sequence, RunnerError<Self>> {
        self.toy.fork(sequence)
    }

    fn step(&mut self, feeds: &mut [SequenceInput<'_, Self::Sequence>]) -> Result<(), RunnerError<Self>> {
        std::thread::sleep(self.step);
        self.toy.step(feeds)
    }

    fn logits(&self) -> &[f32] {
        self.toy.logits()
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let step = std::env::args().nth(1).map_or(Ok(0), |ms| ms.parse())?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = Arc::clone(&stop);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        stopping.store(true, Ordering::Relaxed);
    });
    let served = ModelSetup {
        executor: "toy".into(),
        tokenizer: vocabularies::world(&[b"ab"]),
        format: Some(ChatFormat::Template(Box::new(ChatTemplate::from_jinja(TEMPLATE, &LocalMachine)?))),
        sampling: SamplingParams::default(),
        eos: vec![0],
        drafter: None,
        draft: None,
        adapters: Vec::new(),
        reads_adapters: None,
    };
    let options = ServeOptions {
        max_queue: 16,
        api_keys: vec!["key".into()],
        body_limit: 1 << 20,
        drain_timeout: Duration::from_secs(1),
        traces: mlcc_serve::TraceExporter::from_environment(Some(|what| eprintln!("{what}")))?,
        ..ServeOptions::default()
    };
    let step = PacedToy { toy: toy::ToyModel::new(false, Some(4000)), step: Duration::from_millis(step) };
    let models = vec![("toy".to_owned(), ReadyModel::from_runner(step, served, 4))];
    serve(models, Box::new(NoLibrary), &options, &stop, |address, _| println!("http://{address}"))?;
    Ok(())
}
