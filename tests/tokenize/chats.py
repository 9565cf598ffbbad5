"""Chat templates in small that do what real ones do, and a tokenizer of one token per byte."""

import json

import pyarrow as pa
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from stages.core import tables
from stages.core.model import tiny

SPECIAL = [
    "<|start|>",
    "<|end|>",
    "<|close|>",
    "<s>",
    "<think>",
    "</think>",
    "[Q]",
    "[/Q]",
    "[SYS]",
]

HEAD = "<|start|>{{ m['role'] }}\n"
CHATML = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|start|>system\nBe kind.<|end|>\n{% endif %}" + CHATML
)
TRIM = CHATML.replace("m['content']", "m['content'] | trim")
THINK_PROMPT = CHATML.replace("<|start|>assistant\n{%", "<|start|>assistant\n<think>\n{%")
"""The prompt opens a think block that the chat itself lacks."""
THINK_LAST = (
    "{% for m in messages %}{% set words = m['content'] %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% set words = words.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}<think>\n"
    "{{ m['content'].split('</think>')[0].replace('<think>', '').strip('\n') "
    "if '</think>' in m['content'] else '' }}\n</think>\n\n{% endif %}{% endif %}"
    "{{ words }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Think blocks are taken out of all answers but the last, which always gets one."""
CLOSE_LAST = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{{ '<|close|>' if loop.last and m['role'] == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Another end token after the very last answer."""
STRICT = (
    "<s>{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[Q]{{ m['content'] }}[/Q]{% else %}{{ m['content'] }}<|end|>"
    "{% endif %}{% endfor %}"
)
"""No system role, roles must alternate, no generation prompt of its own."""
SYSTEM_LATE = (
    "<s>{% set start = 1 if messages[0]['role'] == 'system' else 0 %}"
    "{% for m in messages[start:] %}{% if m['role'] == 'user' %}[Q]"
    "{% if loop.last and start %}{{ messages[0]['content'] }}\n\n{% endif %}"
    "{{ m['content'] }}[/Q]{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
)
"""The system text stands in the last question."""
REASONING = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ m['content'] }}",
)
"""Reasoning has a field of its own."""
TOOLS = (
    "{% if tools %}<|start|>system\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Arguments are printed as JSON: an object is wanted."""
TOOLS_STRING = TOOLS.replace(
    "{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}"
)
"""Arguments are joined to a string: a string is wanted."""
TOOL_IDS = TOOLS.replace(
    "{% for call in m.tool_calls or [] %}",
    "{% for call in m.tool_calls or [] %}"
    "{% if call.id is undefined or call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs need 9 letters') }}{% endif %}",
)
"""Calls need an id."""

ALL = {
    "chatml": CHATML,
    "default system": DEFAULT_SYSTEM,
    "trim": TRIM,
    "think prompt": THINK_PROMPT,
    "think last": THINK_LAST,
    "close last": CLOSE_LAST,
    "strict": STRICT,
    "system late": SYSTEM_LATE,
    "tools": TOOLS,
}


def tokenizer(template=None, **changes):
    """Token i below 256 is byte i; then `SPECIAL`."""
    parts = tiny.tokenizer()
    parts["added_tokens"] = [
        {**parts["added_tokens"][0], "id": 256 + i, "content": word}
        for i, word in enumerate(SPECIAL)
    ]
    parts.update(changes)
    backend = Tokenizer.from_str(json.dumps(parts))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", bos_token="<s>")
    made.chat_template = template
    return made


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def write_raw(folder, **splits):
    """Write `data/raw` tables; a row is (kind, record)."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in tables.SPLITS:
        rows = splits.get(split, [])
        columns = {
            "row": range(len(rows)),
            "line": range(1, len(rows) + 1),
            "source": [f"{split}.jsonl"] * len(rows),
            "kind": [kind for kind, _ in rows],
            "record": [json.dumps(record) for _, record in rows],
        }
        table = pa.table({name: list(values) for name, values in columns.items()}, tables.RAW)
        with tables.writing(folder / f"{split}.parquet", tables.RAW) as writer:
            writer.write_table(table)


def read_tokens(folder, split="train"):
    """Rows of `data/tokens/S.parquet` beside those of its side table."""
    rows = []
    for name in (f"{split}.parquet", f"turns/{split}.parquet"):
        rows.append([row for batch in tables.batches(folder / name) for row in batch.to_pylist()])
    return [{**left, **right} for left, right in zip(*rows, strict=True)]
