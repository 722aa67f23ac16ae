// Two texts become one list of words that are in both, only in the first, or only in the second.

const MOST_CELLS = 4e6; // beyond this the table of a comparison is larger than the patience of a browser

export function splitWords(text) {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
}

// [["same" | "gone" | "new", text], ...], neighbours of one kind joined.
export function diff(before, after) {
  let a = splitWords(before),
    b = splitWords(after);
  if (a.length * b.length > MOST_CELLS) [a, b] = [before.split(/(?<=\n)/), after.split(/(?<=\n)/)];
  if (a.length * b.length > MOST_CELLS)
    return [
      ["gone", before],
      ["new", after],
    ];
  const parts = [];
  const put = (kind, text) => {
    if (parts.at(-1)?.[0] === kind) parts.at(-1)[1] += text;
    else parts.push([kind, text]);
  };
  const longest = lengths(a, b),
    wide = b.length + 1;
  let i = 0,
    j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      put("same", a[i]);
      i += 1;
      j += 1;
    } else if (j >= b.length || (i < a.length && longest[(i + 1) * wide + j] >= longest[i * wide + j + 1]))
      put("gone", a[i++]);
    else put("new", b[j++]);
  }
  return parts;
}

// Of the rests from word i of `a` and word j of `b`: how many words they have in common, in order.
function lengths(a, b) {
  const wide = b.length + 1,
    table = new Uint32Array((a.length + 1) * wide);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      table[i * wide + j] =
        a[i] === b[j]
          ? table[(i + 1) * wide + j + 1] + 1
          : Math.max(table[(i + 1) * wide + j], table[i * wide + j + 1]);
    }
  }
  return table;
}
