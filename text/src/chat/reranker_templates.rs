//! A query and a document as the messages of a chat: how rerankers that answer with a token are asked. The
//! roles `query` and `document`, and `system` for an instruction, are those of sentence-transformers.

use super::{ChatError, ChatMessage, ChatSource, ChatTemplate, TemplateInputs};

/// The template that asks Qwen3-Reranker for `yes` or `no`; after its model card.
const QWEN3_RERANKER: &str = "\
{%- set ns = namespace(instruct='Given a web search query, retrieve relevant passages that answer the query', \
query='', document='') -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set ns.instruct = m.content -%}
{%- elif m.role == 'query' -%}{%- set ns.query = m.content -%}
{%- elif m.role == 'document' -%}{%- set ns.document = m.content -%}
{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n<Instruct>: ' + ns.instruct -}}
{{- '\n<Query>: ' + ns.query + '\n<Document>: ' + ns.document -}}
{{- '<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n' -}}";

impl ChatSource {
    /// The template of Qwen3-Reranker, whose files have only that of the chat model that it was made from.
    pub fn qwen3_reranker() -> ChatSource {
        ChatSource::jinja(QWEN3_RERANKER)
    }
}

impl ChatTemplate {
    /// The input of a reranker. `opens_answer`: it ends where the answer begins, if the template leaves that
    /// open.
    pub fn render_pair(
        &self,
        instruct: Option<&str>,
        query: &str,
        document: &str,
        opens_answer: bool,
    ) -> Result<String, ChatError> {
        let mut messages: Vec<ChatMessage> =
            instruct.into_iter().map(|text| ChatMessage::new("system", text)).collect();
        messages.push(ChatMessage::new("query", query));
        messages.push(ChatMessage::new("document", document));
        self.render(&messages, opens_answer, &TemplateInputs::default())
    }

    /// True if both texts of a pair come through the template: that of a chat drops roles that it does not
    /// know.
    pub fn takes_pairs(&self) -> bool {
        const PROBES: [&str; 2] = ["first probe", "second probe"];
        let text = self.render_pair(None, PROBES[0], PROBES[1], true);
        text.is_ok_and(|text| PROBES.iter().all(|probe| text.contains(probe)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::CallerHost;

    #[test]
    fn qwen3_is_asked_for_yes_or_no() {
        let template = ChatSource::qwen3_reranker().compile(&CallerHost).unwrap();
        let begin = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct \
            provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n<Instruct>: ";
        let end =
            "\n<Query>: q \n\n<Document>:  d\n<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
        for (instruct, text) in [
            (None, "Given a web search query, retrieve relevant passages that answer the query"),
            (Some("Find it"), "Find it"),
        ] {
            let found = template.render_pair(instruct, "q \n", " d\n", false).unwrap();
            assert_eq!(found, format!("{begin}{text}{end}"));
        }
    }

    #[test]
    fn templates_of_chats_take_no_pairs() {
        assert!(ChatSource::qwen3_reranker().compile(&CallerHost).unwrap().takes_pairs());
        let chat = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}";
        assert!(!ChatTemplate::from_jinja(chat, &CallerHost).unwrap().takes_pairs());
        assert!(!ChatTemplate::from_jinja("{{ raise_exception('no') }}", &CallerHost).unwrap().takes_pairs());
    }
}
