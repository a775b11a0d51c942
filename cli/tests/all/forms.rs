//! `--json-schema` and `--grammar` of `mlcc run` and `mlcc chat`, with the small model of the project, which
//! by itself writes no JSON.

use std::path::Path;

use serde_json::Value;

use crate::program::{artifact, failure, mlcc, text};

const SCHEMA: &str = r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer",
    "minimum": 0, "maximum": 120}, "ok": {"type": "boolean"}}, "required": ["name", "age", "ok"], "additionalProperties": false}"#;

fn file(folder: &Path, name: &str, content: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, content).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Text of the schema, and the most blanks in a row between its tokens.
fn person(text: &str) -> (Value, usize) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
    let name = value["name"].as_str().unwrap();
    assert!(name.chars().count() <= 20 && value["age"].is_u64() && value["ok"].is_boolean(), "{text}");
    let quoted = serde_json::to_string(name).unwrap();
    let without = text.replacen(&quoted, "\"\"", 1);
    let blanks = without.trim_end().split(|c: char| !c.is_whitespace()).map(str::len).max().unwrap();
    (value, blanks)
}

/// A small model that likes blanks ends its JSON well before it is cut.
#[test]
fn json_of_a_small_model_ends() {
    let folder = tempfile::tempdir().unwrap();
    let schema = file(folder.path(), "person.json", SCHEMA);
    for prompt in ["The old man said", "It was a dark", "Once upon a time", "And then he", "\"", "{"] {
        for sampling in
            [&["--greedy"][..], &["--temp", "0.7", "--seed", "1"], &["--temp", "1", "--seed", "2"]]
        {
            let mut run = mlcc();
            run.arg("run").arg(artifact()).args([
                "-p",
                prompt,
                "-n",
                "300",
                "--no-echo",
                "--json-schema",
                &schema,
            ]);
            let (_, blanks) = person(text(run.args(sampling)).trim_end());
            assert!(blanks <= 24, "{blanks} blanks");
        }
    }
}

#[test]
fn texts_and_answers_are_those_of_a_grammar() {
    let folder = tempfile::tempdir().unwrap();
    let grammar = file(folder.path(), "answer.lark", "start: \"ja\" | \"nein\"\n");
    let schema = file(folder.path(), "person.json", SCHEMA);
    let mut run = mlcc();
    run.arg("run").arg(artifact()).args(["-p", "It was", "--no-echo", "--grammar", &grammar]);
    assert!(["ja\n", "nein\n"].contains(&text(&mut run).as_str()));
    let chat = |flag: &str, file: &str| {
        let mut chat = mlcc();
        chat.arg("chat").arg(artifact()).args([
            "--template",
            "plain",
            "-n",
            "300",
            "--seed",
            "5",
            flag,
            file,
        ]);
        text(chat.write_stdin("It was a dark\nand then\n"))
    };
    let answers = chat("--grammar", &grammar);
    assert!(
        answers.lines().count() == 2 && answers.lines().all(|line| ["ja", "nein"].contains(&line)),
        "{answers}"
    );
    let answers = chat("--json-schema", &schema);
    let values: Vec<Value> =
        serde_json::Deserializer::from_str(&answers).into_iter().map(Result::unwrap).collect();
    assert!(values.len() == 2 && values.iter().all(|value| value["ok"].is_boolean()), "{answers}");
}

#[test]
fn forms_that_cannot_be_enforced_are_errors_that_name_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        ("--json-schema", "{\"type\": ", "not JSON"),
        ("--json-schema", "{\"items\": {\"not\": {\"const\": 1}}}", "`not` at `#/items`"),
        ("--json-schema", "{\"type\": \"strange\"}", "strange"),
        ("--grammar", "start: missing", "missing"),
        ("--grammar", "", "empty"),
    ];
    for (flag, content, part) in cases {
        let path = file(folder.path(), "form", content);
        for command in ["run", "chat"] {
            let mut form = mlcc();
            form.arg(command).arg(artifact()).args([flag, &path]);
            match command {
                "run" => form.args(["-p", "It"]),
                _ => form.args(["--template", "plain"]).write_stdin("It\n"),
            };
            let message = failure(&mut form, 1);
            assert!(message.contains(part) && message.contains("form: "), "{message}");
        }
    }
    let mut missing = mlcc();
    missing.arg("run").arg(artifact()).args(["-p", "It", "--grammar", "no-such-file"]);
    assert!(failure(&mut missing, 1).contains("no-such-file"));
    let mut both = mlcc();
    both.arg("run").arg(artifact()).args(["-p", "It", "--grammar", "a", "--json-schema", "b"]);
    failure(&mut both, 2);
}
