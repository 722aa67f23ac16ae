"""Trains the demo's agent with chat templates of other families, and reports whether its reward rises.

    OMP_NUM_THREADS=1 python -m benchmarks.learn_formats [--formats mistral_v11 glm45 pythonic] [--out FOLDER]

Each template is written here in the syntax of its family: calls with ids (Mistral), turns that end with the next role
(GLM), and calls as Python (Llama 4). `multi_turn.format` stays at auto. Each takes one to three minutes on one core:
fine-tuning on the format, bad habits, then GRPO on the reward alone.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.report import Circumstances
from rally.chat import ChatCodec, tiny_tokenizer
from rally.demo.demo import CALCULATOR
from rally.demo.training_stages import CourseSettings, run_course
from rally.track import RunConsole

MISTRAL = """\
{%- if show_tools is defined and show_tools -%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- m.content -}}
{%- for c in m.tool_calls or [] -%}
[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}
{%- endfor -%}
{{- eos_token -}}
{%- elif m.role == 'tool' -%}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]
{%- else -%}[INST]{{ m.content }}[/INST]
{%- endif -%}
{%- endfor -%}"""
GLM = """\
{%- if show_tools is defined and show_tools -%}<|system|>{{ tools | tojson }}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}<|observation|><tool_response>{{ m.content }}</tool_response>
{%- elif m.role == 'assistant' -%}<|assistant|>{{ m.content }}
{%- for c in m.tool_calls or [] -%}
<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v }}</arg_value>
{% endfor -%}
</tool_call>
{%- endfor -%}
{%- else -%}<|user|>{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
PYTHONIC = """\
{%- if show_tools is defined and show_tools -%}
<|header_start|>system<|header_end|>{{ tools | tojson }}<|eot|>
{%- endif -%}
{%- for m in messages -%}
<|header_start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|header_end|>
{{ m.content }}
{%- if m.tool_calls -%}
[
{%- for c in m.tool_calls -%}
{{ c.function.name }}(
{%- for k, v in c.function.arguments.items() -%}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{%- endfor -%}
){{ ', ' if not loop.last }}
{%- endfor -%}
]
{%- endif -%}
<|eot|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|header_start|>assistant<|header_end|>
{% endif -%}"""


@dataclass(frozen=True)
class Family:
    """A chat template, its end-of-text token, and words of its calls that become tokens."""

    template: str
    eos: str
    words: tuple[str, ...] = ()


FAMILIES = {
    "mistral_v11": Family(MISTRAL, "</s>", ("call0000",)),
    "glm45": Family(GLM, "<|endoftext|>", ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    "pythonic": Family(PYTHONIC, "<|eot|>", ("(expression=", "ipython")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--out", type=Path, default=Path("runs/learn_formats"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20, help="GRPO steps.")
    options = parser.parse_args()
    lines = []
    for name in options.formats:
        family = FAMILIES[name]
        tokenizer = tiny_tokenizer((*CALCULATOR.words, *family.words), chat_template=family.template, eos=family.eos)
        codec = ChatCodec(tokenizer)
        assert codec.format.name == name, f"auto chose {codec.format.name}"
        started = time.perf_counter()
        settings = CourseSettings(seed=options.seed, grpo_steps=options.steps)
        course = replace(CALCULATOR, title=f"calculator, {name}", tokenizer=tokenizer)
        result = run_course(course, options.out / name, settings, RunConsole())
        seconds = time.perf_counter() - started
        lines.append(
            f"{name}: success sampled {result.before['sampled']:.1%} -> {result.after['sampled']:.1%}, greedy "
            f"{result.before['greedy']:.1%} -> {result.after['greedy']:.1%}, {seconds:.0f} s"
        )
    print("\n".join([*lines, Circumstances().sentence()]))


if __name__ == "__main__":
    main()
