//! `mlcc serve`: a compiled model over HTTP. Where it listens goes to standard output with `--json`, everything else to
//! standard error.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use mlcc_serve::{ServeOptions, Served, Stopped};
use serde_json::{Value, json};

use crate::commands::build::parse_bytes;
use crate::commands::speculation::Speculation;
use crate::commands::{chat, run};
use crate::error::CliError;
use crate::interrupt;
use crate::ui::Ui;

#[derive(Debug, clap::Args)]
#[command(after_help = "Example: mlcc serve model.so --port 8080\n\
    Then: curl http://127.0.0.1:8080/v1/completions -d '{\"prompt\": \"The sea was\", \"max_tokens\": 50}'")]
pub struct Args {
    /// A compiled model
    #[arg(env = "MLCC_ARTIFACT")]
    artifact: PathBuf,
    /// Address to listen on; 0.0.0.0 is reachable from other machines
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Print one line of JSON to standard output when requests are taken
    #[arg(long)]
    json: bool,
    /// Texts that run together [default: as many as fit into memory, up to 16, or 4 without --max-batch]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    sequences: Option<u16>,
    /// Texts that wait beside them; more are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_queue: u16,
    /// Memory that may be used, for example 8GB [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    memory: Option<u64>,
    #[command(flatten)]
    threads: super::Threads,
    /// Name of the model for clients [default: the file's name without .so]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    alias: Option<String>,
    /// Key that clients have to send as `Authorization: Bearer KEY`
    #[arg(long, value_name = "KEY", env = "MLCC_API_KEY", hide_env_values = true, value_parser = NonEmptyStringValueParser::new())]
    api_key: Option<String>,
    /// Most bytes of a request's body
    #[arg(long, value_name = "SIZE", default_value = "8MB", value_parser = parse_bytes)]
    body_limit: u64,
    /// End every text after this time, in seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: Option<u64>,
    /// How long texts may go on after SIGTERM or Ctrl-C, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    drain_timeout: u32,
    /// Chat template in place of the model's own: a name (chatml, llama-2, llama-3, ...), a file of Jinja text, or
    /// `plain` for text that is simply continued
    #[arg(long, value_name = "NAME|FILE")]
    template: Option<String>,
    /// Tokenizer file, in place of the one in the artifact
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    #[command(flatten)]
    sampling: run::Sampling,
    #[command(flatten)]
    speculation: Speculation,
}

pub fn run(args: &Args, ui: &Ui) -> Result<(), CliError> {
    let stop = interrupt::flag();
    let model = super::load_to_run(&args.artifact, &args.threads, ui)?;
    let tokenizer = run::tokenizer(&model, args.tokenizer.as_deref())?;
    tokenizer.check_vocab(model.vocab())?;
    let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
    let options = ServeOptions {
        host: args.host,
        port: args.port,
        sequences: args.sequences.map(usize::from),
        max_queue: usize::from(args.max_queue),
        memory: args.memory,
        api_key: args.api_key.clone(),
        body_limit: usize::try_from(args.body_limit).unwrap_or(usize::MAX),
        timeout: args.timeout.map(Duration::from_secs),
        drain_timeout: Duration::from_secs(u64::from(args.drain_timeout)),
    };
    let name = args.alias.clone().or_else(|| Some(args.artifact.file_stem()?.to_string_lossy().into_owned()));
    let name = name.unwrap_or_else(|| "model".into());
    let served = Served {
        drafter: args.speculation.drafter(&model, &tokenizer, &args.threads)?,
        sampling: run::sampling(&metadata, &args.sampling)?,
        format: chat::known_format(&model, args.template.as_deref())?,
        eos: run::eos_ids(&metadata),
        name: name.clone(),
        executor: model.executor().to_owned(),
        tokenizer,
    };
    let has_chat = served.format.is_some();
    let ready = |address: SocketAddr, sequences: usize| {
        let url = format!("http://{address}");
        if args.json {
            let mut out = std::io::stdout().lock();
            let line = json!({"event": "ready", "url": url, "model": name, "sequences": sequences});
            // Who does not read it needs no error.
            let _ = writeln!(out, "{line}").and_then(|()| out.flush());
        }
        ui.note(format_args!("{name} at {url}/v1, {sequences} texts together. Ctrl-C ends in order."));
        if !has_chat {
            ui.note("It has no chat template: /v1/completions works, /v1/chat/completions needs --template.");
        }
    };
    match mlcc_serve::serve(&model, served, &options, stop, ready)? {
        Stopped::Drained => {}
        Stopped::Cut => ui.warn("some texts were ended before their time (--drain-timeout)"),
    }
    Ok(())
}
