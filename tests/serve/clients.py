"""openai, anthropic and langchain-openai against a server over the toy model: `tests/serve/run`."""

import json
import subprocess
import sys
from importlib.metadata import version

import anthropic
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

TOOL_SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Jena"]}},
    "required": ["city"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Hi"}]


def raises(kind, body):
    try:
        body()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def with_openai(url):
    client = openai.OpenAI(base_url=url + "/v1", api_key="key", max_retries=0)
    assert [model.id for model in client.models.list()] == ["toy"]
    chat = client.chat.completions
    whole = chat.create(model="toy", messages=MESSAGES, max_tokens=9, seed=1, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.role == "assistant" and whole.usage.total_tokens > 0
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    options = {"include_usage": True}
    pieces = list(chat.create(model="toy", messages=MESSAGES, max_tokens=9, seed=1, stream=True, stream_options=options))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content and pieces[-1].usage.completion_tokens > 0
    schema = {"name": "place", "schema": TOOL_SCHEMA, "strict": True}
    held = chat.create(model="toy", messages=MESSAGES, response_format={"type": "json_schema", "json_schema": schema})
    assert json.loads(held.choices[0].message.content)["city"] in ("Ulm", "Jena")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": TOOL_SCHEMA}}]
    called = chat.create(model="toy", messages=MESSAGES, tools=tools, tool_choice="required", seed=3)
    message = called.choices[0].message
    assert called.choices[0].finish_reason == "tool_calls" and message.tool_calls[0].function.name == "weather"
    with chat.stream(model="toy", messages=MESSAGES, tools=tools, tool_choice="required", seed=3) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert [c.function.arguments for c in streamed.tool_calls] == [c.function.arguments for c in message.tool_calls]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    next_turn = MESSAGES + [message.model_dump(exclude_none=True)] + results
    chat.create(model="toy", messages=next_turn, tools=tools, max_tokens=3)
    several = client.completions.create(model="toy", prompt=["a", "b"], n=2, max_tokens=4, extra_body={"guided_choice": ["xy"]})
    assert [choice.text for choice in several.choices] == ["xy"] * 4
    with_responses(client)
    raises(openai.NotFoundError, lambda: chat.create(model="other", messages=MESSAGES))
    wrong = raises(openai.BadRequestError, lambda: chat.create(model="toy", messages=MESSAGES, temperature=-1))
    assert wrong.param == "temperature", wrong
    raises(openai.AuthenticationError, lambda: openai.OpenAI(base_url=url + "/v1", api_key="no").models.list())


def with_responses(client):
    asked = {"model": "toy", "input": "Hi", "max_output_tokens": 9, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text and whole.status == "incomplete" and whole.usage.output_tokens == 9
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == whole.output_text
    client.responses.create(**{**asked, "input": "More"}, previous_response_id=whole.id, instructions="Be brief.")
    tools = [{"type": "function", "name": "weather", "parameters": TOOL_SCHEMA, "strict": True}]
    called = client.responses.create(model="toy", input="Hi", tools=tools, tool_choice="required", extra_body={"seed": 3})
    with client.responses.stream(model="toy", input="Hi", tools=tools, tool_choice="required", extra_body={"seed": 3}) as stream:
        assert [item.arguments for item in stream.get_final_response().output] == [item.arguments for item in called.output]
    call = called.output[0]
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Ulm", "Jena")
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "rain"} for item in called.output]
    client.responses.create(**{**asked, "input": results}, previous_response_id=called.id, tools=tools)


def with_anthropic(url):
    client = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0)
    asked = {"model": "toy", "max_tokens": 9, "messages": MESSAGES, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    assert whole.usage.output_tokens == 9 and whole.stop_reason == "max_tokens"
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    counted = client.messages.count_tokens(model="toy", messages=MESSAGES).input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    tools = [{"name": "weather", "description": "d", "input_schema": TOOL_SCHEMA}]
    wanted = {**asked, "max_tokens": 999, "tools": tools, "tool_choice": {"type": "any"}}
    called = client.messages.create(**wanted)
    call = called.content[0]
    assert called.stop_reason == "tool_use" and call.input["city"] in ("Ulm", "Jena")
    with client.messages.stream(**wanted) as stream:
        assert stream.get_final_message().content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = MESSAGES + [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    client.messages.create(**{**asked, "messages": turns, "tools": tools})
    raises(anthropic.BadRequestError, lambda: client.messages.create(**{**asked, "extra_body": {"temperature": -1}}))
    raises(anthropic.NotFoundError, lambda: client.messages.create(**{**asked, "model": "other"}))


def with_langchain(url):
    options = {"base_url": url + "/v1", "api_key": "key", "model": "toy", "max_retries": 0, "seed": 1}
    chat = ChatOpenAI(**options, max_tokens=9, temperature=0, stream_usage=True)
    whole = chat.invoke("Hi")
    assert whole.usage_metadata["output_tokens"] == 9 and whole.response_metadata["finish_reason"] == "length", whole
    pieces = list(chat.stream("Hi"))
    assert "".join(piece.content for piece in pieces) == whole.content
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) == 9
    assert [answer.content for answer in chat.batch(["Hi", "Hi"])] == [whole.content] * 2
    free = ChatOpenAI(**options)
    schema = {"title": "place", "description": "d", **TOOL_SCHEMA}
    for method in ("json_schema", "function_calling"):
        held = free.with_structured_output(schema, method=method).invoke("Hi")
        assert held["city"] in ("Ulm", "Jena"), held
    tool = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": TOOL_SCHEMA}}
    called = free.bind_tools([tool], tool_choice="any").invoke("Hi")
    assert {call["name"] for call in called.tool_calls} == {"weather"} and not called.invalid_tool_calls, called
    results = [ToolMessage("rain", tool_call_id=call["id"]) for call in called.tool_calls]
    chat.bind_tools([tool]).invoke([HumanMessage("Hi"), called, *results])
    assert ChatOpenAI(**{**options, "seed": None}, max_tokens=9, temperature=0, use_responses_api=True).invoke("Hi").text == whole.content
    text = OpenAI(**options, max_tokens=9, temperature=0)
    assert "".join(text.stream("Hi")) == text.invoke("Hi")


def main():
    server = subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().strip()
        with_openai(url)
        print(f"openai {openai.__version__}: ok")
        with_anthropic(url)
        print(f"anthropic {anthropic.__version__}: ok")
        with_langchain(url)
        print(f"langchain-openai {version('langchain-openai')}: ok")
    finally:
        server.stdin.close()
        server.wait()


main()
