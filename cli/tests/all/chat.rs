//! `mlcc chat` with scripted conversations.

use crate::program::{self, artifact, books, copy_of, fails_with, failure, mlcc, text};

/// Runs a conversation of these lines; standard output by line.
fn talk(args: &[&str], lines: &[&str]) -> Vec<String> {
    let mut chat = mlcc();
    chat.arg("chat").arg(artifact()).args(["--template", "plain", "-n", "8", "--seed", "5", "-t", "1"]);
    let output = chat.args(args).write_stdin(lines.join("\n")).assert().success().get_output().clone();
    String::from_utf8(output.stdout).unwrap().lines().map(String::from).collect()
}

/// The number before `unit` in a line of /stats.
fn number(line: &str, unit: &str) -> usize {
    let before = line.split(unit).next().unwrap_or_else(|| panic!("no {unit} in {line}"));
    before.split_whitespace().last().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{unit}: {line}"))
}

#[test]
fn later_turns_read_only_what_is_new() {
    let out =
        talk(&["--greedy"], &["It was a dark and", "/stats", " and then he", "/stats", "/exit", "unread"]);
    let [first, context, turn, second, _, turn2] = &out[..] else { panic!("{out:?}") };
    assert!(first.contains("dark"), "{first}");
    assert!(!second.is_empty());
    assert_eq!(number(turn, " of them in the context before"), 0);
    let fed = number(context, " tokens, no limit");
    assert_eq!(number(turn2, " of them in the context before"), fed, "{turn2}");
    let read = number(turn2, " read at");
    assert!(read > 0 && read < 12, "{turn2}");
    // The same text in one piece gives the same answer.
    let whole = format!("It was a dark and{first} and then he");
    assert_eq!(talk(&["--greedy"], &[&whole])[0], *second);
}

/// The answers of a conversation; they may have several lines.
fn answers(args: &[&str], lines: &[&str]) -> Vec<String> {
    let with_marks: Vec<&str> = lines.iter().flat_map(|line| [*line, "/stats"]).collect();
    let mut out = vec![String::new()];
    for line in talk(args, &with_marks) {
        match out.last_mut() {
            _ if line.starts_with("context: ") => out.push(String::new()),
            Some(answer) if !line.starts_with("last turn: ") => *answer += &line,
            _ => {}
        }
    }
    out.pop();
    out
}

#[test]
fn regenerated_answers_depend_on_the_seed() {
    let lines = ["The old man", "Again he", "/regen", "/set seed=6;temperature=1.5", "/regen"];
    let out = answers(&["--temp", "0.8"], &[&lines[..], &["/set seed=5; temp=0.8", "/regen"]].concat());
    let [_, first, again, _, other, _, back] = &out[..] else { panic!("{out:?}") };
    assert_eq!(first, again);
    assert_ne!(first, other);
    assert_eq!(first, back);
}

#[test]
fn kept_conversations_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk.json");
    let path = file.to_str().unwrap();
    let whole = answers(&[], &["The old man", &format!("/save {path}"), " and the sea", "/regen"]);
    assert_eq!(answers(&["--load", path], &[" and the sea", "/regen"]), whole[2..]);
    let load = format!("/load {path}");
    let loaded = answers(&[], &["Something else", "/reset", &load, " and the sea"]);
    assert_eq!(loaded[3], whole[2]);
    let loaded = talk(&[], &[&load, " and the sea", "/stats"]);
    assert!(number(&loaded[loaded.len() - 1], " of them in the context before") > 8, "{loaded:?}");
    // Without the state file the conversation is read again.
    std::fs::remove_file(folder.path().join("talk.json.state")).unwrap();
    assert_eq!(answers(&["--load", path], &[" and the sea"])[0], whole[2]);
    let again = talk(&["--load", path], &[" and the sea", "/stats"]);
    assert_eq!(number(&again[again.len() - 1], " of them in the context before"), 0);
}

#[test]
fn messages_may_have_several_lines() {
    let folded = talk(&["--greedy"], &["The old\\", "man"]);
    assert_eq!(folded, talk(&["--greedy"], &["\"\"\"", "The old", "man", "\"\"\""]));
    assert_eq!(folded.len(), 1);
    assert_ne!(folded, talk(&["--greedy"], &["The old man"]));
    // Two slashes are one that is no command.
    let out = talk(&["--greedy"], &["//help", "/help"]);
    assert!(out[0] != out[1] && out.iter().any(|l| l.starts_with("/regen")), "{out:?}");
}

#[test]
fn settings_are_listed() {
    let out = talk(&["--temp", "0.5", "--stop", "x"], &["/set top_k=7;max_tokens=3", "/set"]);
    for line in ["temperature = 0.5", "top_k = 7", "max_tokens = 3", "seed = 5", "stop = x"] {
        assert!(out.iter().any(|l| l == line), "{line}: {out:?}");
    }
}

#[test]
fn families_without_values_of_their_own_have_their_makers() {
    let model = copy_of(&books());
    std::fs::remove_file(model.path().join("generation_config.json")).unwrap();
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(model.path()).args([
        "--quant",
        "q8f16_1",
        "--no-report",
        "-o",
        "model.so",
    ]);
    build.current_dir(model.path()).assert().success();
    let mut chat = mlcc();
    chat.args(["chat", "model.so", "--template", "plain"]).current_dir(model.path());
    let out = text(chat.write_stdin("/set\n"));
    for line in ["temperature = 1.2", "top_p = 0.6", "repeat_penalty = 0.996", "top_k = 0", "min_p = 0"] {
        assert!(out.lines().any(|l| l == line), "{line}: {out}");
    }
}

#[test]
fn templates_come_from_names_and_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("t.jinja");
    std::fs::write(&file, "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    let chat = |template: &str, lines: &str| {
        let mut chat = mlcc();
        chat.arg("chat").arg(artifact()).args(["-n", "8", "--greedy", "-t", "1", "--template", template]);
        chat.write_stdin(lines.to_owned());
        chat
    };
    let output = chat(file.to_str().unwrap(), "The old man\n").assert().success().get_output().stdout.clone();
    assert_eq!(
        String::from_utf8(output).unwrap().trim_end_matches('\n'),
        talk(&["--greedy"], &["The old man"])[0]
    );
    for name in ["rwkv-world", "chatml"] {
        chat(name, "Hello\n").assert().success();
    }
    std::fs::write(&file, "{{ raise_exception('not today') }}").unwrap();
    let output = chat(file.to_str().unwrap(), "Hello\n/stats\n").assert().code(1).get_output().clone();
    assert!(String::from_utf8_lossy(&output.stderr).contains("not today"));
    assert!(String::from_utf8_lossy(&output.stdout).contains("context: 0 tokens"), "the chat goes on");
    std::fs::write(&file, "{% for").unwrap();
    assert!(failure(&mut chat(file.to_str().unwrap(), ""), 1).contains("not a valid template"));
}

#[test]
fn a_build_may_name_the_template() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("loud.jinja");
    std::fs::write(&file, "{% for m in messages %}<{{ m.content | upper }}>{% endfor %}").unwrap();
    let build = |template: &str| {
        let mut build = mlcc();
        build.arg("build").arg("-m").arg(books()).args([
            "--quant",
            "q8f16_1",
            "--no-report",
            "-o",
            "model.so",
        ]);
        build.arg("--template").arg(template).current_dir(folder.path());
        build
    };
    build("loud.jinja").assert().success();
    let mut chat = mlcc();
    chat.args(["chat", "model.so", "-n", "2", "--greedy"]).current_dir(folder.path());
    chat.write_stdin("hello\n/quit\n").assert().success();
    let artifact = std::fs::read(folder.path().join("model.so")).unwrap();
    let holds = |text: &str| artifact.windows(text.len()).any(|w| w == text.as_bytes());
    assert!(holds("m.content | upper"));
    build("chatml").assert().success();
    failure(&mut build("no-such-template"), 2);
    std::fs::write(&file, "{% for m in messages %}").unwrap();
    fails_with(&mut build("loud.jinja"), &["template"]);
}

/// A model that was not trained to chat goes on with what is written, and says so.
#[test]
fn without_a_template_texts_are_continued() {
    let mut chat = mlcc();
    chat.arg("chat").arg(artifact()).args(["-n", "8", "--greedy", "--seed", "5", "-t", "1"]);
    let output = chat.write_stdin("It was a dark and\n").assert().success().get_output().clone();
    let (answer, told) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(answer.trim_end_matches('\n'), talk(&["--greedy"], &["It was a dark and"])[0]);
    assert!(told.contains("no chat template") && told.contains("--template"), "{told}");
    // The banner has the model's name.
    assert!(told.contains("rwkv4-tiny-books"), "{told}");
}

/// The argument of `run` is a message where the model has a template, and a text to go on with where it has
/// none or --raw says so.
#[test]
fn run_answers_by_the_template() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("loud.jinja");
    let build = |text: &str, name: &str| {
        std::fs::write(&file, text).unwrap();
        let path = folder.path().join(name);
        let mut build = mlcc();
        build.arg("build").arg("-m").arg(books()).args(["--quant", "q8f16_1", "--no-report", "--template"]);
        build.arg(&file).arg("-o").arg(&path).assert().success();
        path
    };
    let path = build("It was {% for m in messages %}{{ m.content }}{% endfor %} and", "loud.so");
    let run = |flags: &[&str]| {
        let mut run = mlcc();
        run.arg("run").arg(&path).args(["--greedy", "-t", "1"]).args(flags);
        run.args((!flags.contains(&"-n")).then_some("-n=8"));
        let output = run.assert().success().get_output().clone();
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let plain = |prompt: &str, flags: &[&str]| {
        let mut run = mlcc();
        run.arg("run").arg(artifact()).args(["-p", prompt, "-n", "8", "--greedy", "-t", "1"]).args(flags);
        text(&mut run)
    };
    let (answer, told) = run(&["-p", "a dark"]);
    assert_eq!(answer, plain("It was a dark and", &["--no-echo"]));
    assert!(told.contains("chat template") && told.contains("--raw"), "{told}");
    let mut chat = mlcc();
    chat.arg("chat").arg(&path).args(["-n", "8", "--greedy", "-t", "1"]).write_stdin("a dark\n");
    assert_eq!(text(&mut chat), answer);
    let (raw, told) = run(&["-p", "a dark", "--raw"]);
    assert_eq!(raw, plain("a dark", &[]));
    assert!(!told.contains("template"), "{told}");
    assert!(run(&["-p", "a dark", "-q"]).1.is_empty());
    // A state file holds a text: what goes into it and what comes after it is no message.
    let state = folder.path().join("x.state");
    let (begin, told) = run(&["-p", "It was a", "-n", "0", "--save-state", state.to_str().unwrap()]);
    assert!(begin == "It was a\n" && told.contains("state file"), "{begin} {told}");
    let (rest, _) = run(&["-p", " dark and", "--no-echo", "--load-state", state.to_str().unwrap()]);
    assert_eq!(rest, answer);
    let path = build("{{ raise_exception('not today') }}", "strict.so");
    let mut strict = mlcc();
    fails_with(strict.arg("run").arg(&path).args(["-p", "a"]), &["not today", "--raw"]);
    let mut raw = mlcc();
    raw.arg("run").arg(&path).args(["-p", "a", "--raw", "-n", "2"]).assert().success();
}

/// Published templates write the begin and end tokens by these names.
#[test]
fn named_templates_know_the_special_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = folder.path().join("checkpoint");
    std::fs::create_dir(&checkpoint).unwrap();
    for file in std::fs::read_dir(books()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), checkpoint.join(file.file_name())).unwrap();
    }
    // With tokens, and without a template.
    let config = r#"{"bos_token": "<first>", "eos_token": {"content": "<last>"}}"#;
    std::fs::write(checkpoint.join("tokenizer_config.json"), config).unwrap();
    let template = folder.path().join("t.jinja");
    std::fs::write(&template, "{{ raise_exception(bos_token ~ ' and ' ~ eos_token) }}").unwrap();
    let build = |output: &str, more: &[&str]| {
        let mut build = mlcc();
        build
            .args(["build", "-m", "checkpoint", "--quant", "q8f16_1", "--no-report", "-o", output])
            .args(more);
        build.current_dir(folder.path()).assert().success();
    };
    let said = |more: &[&str]| {
        let mut chat = mlcc();
        chat.arg("chat").args(more).current_dir(folder.path()).write_stdin("Hello\n");
        String::from_utf8(chat.assert().code(1).get_output().stderr.clone()).unwrap()
    };
    build("plain.so", &[]);
    build("told.so", &["--template", "t.jinja"]);
    for chat in
        [&["plain.so", "--template", "t.jinja"][..], &["told.so"], &["told.so", "--template", "t.jinja"]]
    {
        assert!(said(chat).contains("<first> and <last>"), "{chat:?}: {}", said(chat));
    }
    // The ids of the model say it where no file has names.
    assert!(said(&[artifact().to_str().unwrap(), "--template", "t.jinja"]).contains(" and <|endoftext|>"));
}

#[test]
fn mistakes_are_named_and_end_nothing() {
    let mut chat = mlcc();
    let message = failure(chat.arg("chat").arg(artifact()).args(["--template", "lama"]), 2);
    assert!(message.contains("`lama`") && message.contains("llama-3"), "{message}");
    let mut chat = mlcc();
    let message = failure(chat.arg("chat").arg(artifact()).args(["--template", "plain", "--top-p", "7"]), 2);
    assert!(message.contains("--top-p is 7"), "{message}");
    let mut chat = mlcc();
    failure(chat.arg("chat").arg(artifact()).args(["--template", "plain", "--stop", ""]), 2);
    for (line, part) in [
        ("/nonsense", "no command /nonsense"),
        ("/set colour=red", "`colour`"),
        ("/set temperature=-3", "temperature"),
        ("/load no-such-file", "no-such-file"),
        ("/save", "name of a file"),
        ("/save no-such-folder/x", "no-such-folder"),
        (&format!("/save {}", artifact().display()), "not a saved conversation, so it is not replaced"),
        ("/regen", "send a message first"),
    ] {
        let mut chat = mlcc();
        chat.arg("chat").arg(artifact()).args(["--template", "plain", "-n", "4"]);
        let output = chat.write_stdin(format!("{line}\nThe old man\n")).assert().code(1).get_output().clone();
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains("error: ") && message.contains(part), "{line}: {message}");
        assert!(!output.stdout.is_empty(), "{line} ends nothing");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x");
    // Nor does the state of a conversation replace anything else.
    std::fs::write(folder.path().join("x.state"), "my notes").unwrap();
    let mut chat = mlcc();
    chat.arg("chat")
        .arg(artifact())
        .args(["--template", "plain"])
        .write_stdin(format!("/save {}\n", file.display()));
    let output = chat.assert().code(1).get_output().clone();
    assert!(String::from_utf8(output.stderr).unwrap().contains("not a state file, so it is not replaced"));
    assert_eq!(std::fs::read(folder.path().join("x.state")).unwrap(), b"my notes");
    assert!(!file.exists());
    std::fs::write(&file, "{\"mlcc_conversation\": 9}").unwrap();
    let mut chat = mlcc();
    chat.arg("chat").arg(artifact()).args(["--template", "plain", "--load"]).arg(&file);
    assert!(failure(&mut chat, 1).contains("not a saved conversation"));
}

/// The trained transformer: a conversation gives what one prompt of the same text gives, and goes back in its
/// cache.
#[test]
fn caches_give_what_one_prompt_gives() {
    let shared = std::env::var_os("MLCC_SHARED");
    let shared = shared.map_or_else(|| program::workspace().join("../shared"), std::path::PathBuf::from);
    let model = shared.join("models/llama-tiny-books");
    if !model.exists() {
        eprintln!(
            "skipped: {} is absent (set MLCC_SHARED to the folder of reference files)",
            model.display()
        );
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("llama.so");
    mlcc().arg("build").arg("-m").arg(&model).args(["-c", "200", "-o"]).arg(&path).assert().success();
    let talk = |lines: &str| -> Vec<String> {
        let mut chat = mlcc();
        chat.arg("chat").arg(&path).args(["--template", "plain", "-n", "6", "--greedy", "-r", "\n"]);
        let output = chat.write_stdin(lines.to_owned()).assert().success().get_output().clone();
        String::from_utf8(output.stdout).unwrap().lines().map(String::from).collect()
    };
    let file = folder.path().join("talk.json").display().to_string();
    let out = talk(&format!("The old man\n and the\n/stats\n/regen\n/save {file}\n, for the\n"));
    let [first, second, _, stats, again, third] = &out[..] else { panic!("{out:?}") };
    assert!(!first.is_empty() && second == again, "{out:?}");
    let whole = format!("The old man{first} and the");
    assert_eq!(talk(&whole)[0], *second);
    // All computed tokens are reused, but for a last token that may go on otherwise.
    assert!(number(stats, " of them in the context before") > 6, "{stats}");
    let mut loaded = mlcc();
    loaded.arg("chat").arg(&path).args([
        "--template",
        "plain",
        "-n",
        "6",
        "--greedy",
        "-r",
        "\n",
        "--load",
        &file,
    ]);
    let output = loaded.write_stdin(", for the\n/stats\n").assert().success().get_output().stdout.clone();
    let output = String::from_utf8(output).unwrap();
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines[0], third);
    assert!(number(lines[2], " of them in the context before") > 12, "{output}");
}
