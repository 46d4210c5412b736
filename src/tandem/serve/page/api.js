// Talks to the server. Knows the key and how to ask for it; does not know what is shown.

const STORE = "tandem-key";
let key = sessionStorage.getItem(STORE) ?? "";
let asking = null;

export const hasKey = () => key !== "";

export function forgetKey() {
  key = "";
  sessionStorage.removeItem(STORE);
}

/** Opens the dialog once, however many requests were refused; resolves when a key was given. */
function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const field = document.getElementById("key");
    document.getElementById("key-note").textContent = wrong
      ? "The server does not know this key. Try another."
      : "This server answers only those who have a key. It stays in this tab.";
    field.value = "";
    dialog.oncancel = (event) => event.preventDefault();
    dialog.onclose = () => {
      key = field.value.trim();
      sessionStorage.setItem(STORE, key);
      asking = null;
      resolve();
    };
    dialog.showModal();
    field.focus();
  });
  return asking;
}

/** fetch with the key; asks for one while the server wants one. */
export async function ask(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = { ...options.headers, ...(used ? { authorization: `Bearer ${used}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    if (used === key) await askForKey(used !== "");
  }
}

export async function getJson(path, options) {
  const response = await ask(path, options);
  const body = await response.json();
  if (!response.ok) throw new Error(body?.error?.message ?? `HTTP ${response.status}`);
  return body;
}

/** The events of a streamed answer, as objects. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
