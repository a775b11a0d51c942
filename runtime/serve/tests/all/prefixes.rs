//! Prefix caching among chats of a model that cannot roll back: the server names the borders of turns.

use serde_json::{Value, json};

use crate::server::{TestServer, options};
use crate::toy::ToyModel;

const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}";

#[test]
fn chats_are_read_from_where_they_part() {
    let server = TestServer::start(&ToyModel::new(true, None), 2, Some(TEMPLATE), options());
    let system = "Answer in one word, whatever somebody asks, and never tell why.";
    // How many tokens of its prompt were known, and how many are read.
    let ask = |messages: Value| {
        let body = json!({"messages": messages, "max_tokens": 3, "seed": 1});
        let answer = server.ask("/v1/chat/completions", &body);
        let count = |name: &str| answer["timings"][name].as_u64().unwrap() as usize;
        (count("cache_n"), count("prompt_n"))
    };
    let first =
        |user: &str| json!([{"role": "system", "content": system}, {"role": "user", "content": user}]);
    let before = format!("[system] {system}\n[user] ").len();
    assert_eq!(ask(first("What is a fish?")).0, 0);
    let rest = |text: &str| format!("{text}\n[assistant] ").len();
    assert_eq!(ask(first("And a bird?")), (before, rest("And a bird?")));
    // A conversation that this server has never seen, and then with another last turn.
    let talk = |last: &str| {
        json!([{"role": "system", "content": system}, {"role": "user", "content": "Who are you, and who am I to you?"},
            {"role": "assistant", "content": "A machine that answers."}, {"role": "user", "content": last}])
    };
    let turns =
        format!("{}\n[assistant] A machine that answers.\n[user] ", "Who are you, and who am I to you?");
    assert_eq!(ask(talk("Why is that?")).0, before);
    assert_eq!(ask(talk("How so, if you like?")), (before + turns.len(), rest("How so, if you like?")));
}
