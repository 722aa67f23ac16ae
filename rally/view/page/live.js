// A view asks again when what it shows has changed, no older answer covers a newer one, and a failure is told in words.

// `about()` says in a string what the answer depends on, `ask()` promises the answer, `show` and `fail` take it.
export function live({ about, ask, show, fail }) {
  let asked = 0,
    shown = 0, // the number of the question whose answer is on the screen
    seen = null,
    last = null;

  function question() {
    const mark = ++asked;
    const ifNewer = (take) => (value) => {
      if (mark <= shown) return;
      shown = mark;
      take(value);
    };
    seen = about();
    return ask().then(ifNewer(accept), ifNewer(refuse));
  }

  // The same again is not drawn again: what a reader opened, chose or scrolled to stays.
  function accept(answer) {
    const text = JSON.stringify(answer);
    if (text === last) return;
    last = text;
    show(answer);
  }

  function refuse(problem) {
    seen = last = null; // the next change of anything asks again
    fail(problem);
  }

  return {
    refresh: () => {
      if (about() !== seen) question();
    },
    // For another place, so that what was asked before is of no interest any more.
    load: () => {
      shown = asked;
      last = null;
      return question();
    },
    close: () => {
      shown = Infinity;
    },
  };
}
