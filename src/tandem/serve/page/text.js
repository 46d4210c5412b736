// A little of Markdown as DOM nodes: code, lists, bold, italics, headings. Text only ever becomes text, never markup.

function inline(parent, text) {
  for (const part of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*|\*[^*\s][^*\n]*\*)/)) {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) add(parent, "code", part.slice(1, -1));
    else if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) add(parent, "strong", part.slice(2, -2));
    else if (part.length > 2 && part.startsWith("*") && part.endsWith("*")) add(parent, "em", part.slice(1, -1));
    else if (part) parent.append(part);
  }
  return parent;
}

function add(parent, name, text) {
  const found = document.createElement(name);
  if (text !== undefined) found.textContent = text;
  parent.append(found);
  return found;
}

function prose(text, found) {
  let list = null;
  for (const block of text.split(/\n{2,}/)) {
    let lines = [];
    const flush = () => {
      const joined = lines.join("\n").trim();
      lines = [];
      if (joined) found.push(inline(document.createElement("p"), joined));
    };
    list = null;
    for (const line of block.split("\n")) {
      const item = /^\s*(?:([-*+])|\d+[.)])\s+(.*)/.exec(line);
      const heading = /^#{1,6}\s+(.*)/.exec(line);
      if (item) {
        flush();
        const kind = item[1] ? "UL" : "OL";
        if (list?.tagName !== kind) {
          list = document.createElement(kind);
          if (kind === "OL") list.start = parseInt(line, 10) || 1;
          found.push(list);
        }
        inline(add(list, "li"), item[2]);
      } else if (heading) {
        flush();
        list = null;
        add(found[found.push(document.createElement("p")) - 1], "strong", heading[1]);
      } else {
        list = null;
        lines.push(line);
      }
    }
    flush();
  }
}

/** The text as a list of nodes; code that is still open counts as code. */
export function render(text) {
  const found = [];
  text.split(/^```[^\n]*\n?/m).forEach((part, i) => {
    if (i % 2 === 0) return prose(part, found);
    const box = document.createElement("pre");
    add(box, "code", part.replace(/\n$/, ""));
    found.push(box);
  });
  return found;
}
