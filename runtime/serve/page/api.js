// Requests to the server that the page comes from.

const KEY = "mlcc.key";

/** The API key stays in this tab. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

function headers() {
  const own = { "content-type": "application/json" };
  if (key.get()) {
    own.authorization = `Bearer ${key.get()}`;
  }
  return own;
}

async function failure(response) {
  const text = await response.text();
  try {
    return new Error(JSON.parse(text).error.message);
  } catch {
    return new Error(`status ${response.status}: ${text.slice(0, 200)}`);
  }
}

export async function get(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) {
    throw await failure(response);
  }
  return response.json();
}

/** The objects of a stream of server-sent events, until `[DONE]`. */
export async function* stream(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) {
    throw await failure(response);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) {
      throw new Error("the server ended the stream before its end");
    }
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") {
        return;
      }
      if (line.startsWith("data: ")) {
        const data = JSON.parse(line.slice(6));
        if (data.error) {
          throw new Error(data.error.message);
        }
        yield data;
      }
    }
  }
}
