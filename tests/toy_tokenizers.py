"""Tokenizers of one token a byte, so that masks can be read off a text; chat templates with the quirks of real ones.

Each template comes with `*_pieces`: its rendering written by hand, cut into what the model has to write (True) or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

Messages = Sequence[dict[str, str]]
Pieces = list[tuple[str, bool]]


def byte_tokenizer(
    template: str | None = None,
    *,
    special: Sequence[str] = ("<s>", "</s>"),
    bos: str | None = None,
    eos: str | None = "</s>",
    pad: str | None = None,
    writes_bos: bool = False,
    trims_offsets: bool = False,
) -> PreTrainedTokenizerFast:
    """`writes_bos`: the tokenizer itself begins plain text with BOS. `trims_offsets`: spaces count as no characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    steps = [processors.ByteLevel(trim_offsets=trims_offsets)]
    if writes_bos:
        pattern = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
        steps.append(pattern)
    backend.post_processor = processors.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer


def spaced_tokenizer(scheme: str, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """One token a character, spaces as "▁", of which text begins with one more, as SentencePiece's does."""
    tokens = [*map(chr, range(32, 127)), "\n", "▁", *("".join(pair) for pair in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chatml_pieces(messages: Messages) -> Pieces:
    pieces = [] if messages[0]["role"] == "system" else [("<|im_start|>system\nBe good.<|im_end|>\n", False)]
    for message in messages:
        own = message["role"] == "assistant"
        pieces += [(f"<|im_start|>{message['role']}\n", False)]
        pieces += [(message["content"] + "<|im_end|>", own), ("\n", False)]
    return pieces


LLAMA = (
    "{{ bos_token }}<|start|>system<|end|>\n\nToday: {{ '26 Jul' }}{% if messages[0].role == 'system' %}"
    "{{ '\n\n' + messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}<|eot|>"
    "{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)


def llama_pieces(messages: Messages) -> Pieces:
    pieces = [("<s><|start|>system<|end|>\n\nToday: 26 Jul", False)]
    if messages[0]["role"] == "system":
        pieces.append((f"\n\n{messages[0]['content'].strip()}", False))
        messages = messages[1:]
    pieces.append(("<|eot|>", False))
    for message in messages:
        own = message["role"] == "assistant"
        pieces += [(f"<|start|>{message['role']}<|end|>\n\n", False), (message["content"].strip() + "<|eot|>", own)]
    return pieces


GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set lead = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set lead = '' %}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ lead if loop.first else '' }}"
    "{{ m.content | trim }}</turn>\n{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)


def gemma_pieces(messages: Messages) -> Pieces:
    lead = ""
    if messages[0]["role"] == "system":
        lead, messages = messages[0]["content"] + "\n\n", messages[1:]
    pieces = [("<s>", False)]
    for message in messages:
        own = message["role"] == "assistant"
        pieces += [(f"<turn>{'model' if own else 'user'}\n{lead}", False)]
        pieces += [(message["content"].strip() + "</turn>", own), ("\n", False)]
        lead = ""
    return pieces


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}[INST] {{ m.content | trim }} [/INST]{% endif %}{% endfor %}"
)


def mistral_pieces(messages: Messages) -> Pieces:
    pieces = [("<s>", False)]
    for message in messages:
        content = message["content"].strip()
        own = message["role"] == "assistant"
        pieces.append((f" {content}</s>" if own else f"[INST] {content} [/INST]", own))
    return pieces


# Reasoning stays in the answer to the last question only, where an empty one is written if there is none.
QWEN = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}{% set thought = '' %}"
    "{% if '</think>' in m.content %}{% set thought = m.content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set thought = thought.strip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ answer }}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen_pieces(messages: Messages) -> Pieces:
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=0)
    pieces = []
    for index, message in enumerate(messages):
        content, own = message["content"], message["role"] == "assistant"
        if own:
            answer, thought = content.split("</think>")[-1].lstrip("\n"), ""
            if "</think>" in content:
                thought = content.split("</think>")[0].split("<think>")[-1].strip("\n")
            content = (f"<think>\n{thought}\n</think>\n\n" if index > last else "") + answer
        pieces += [(f"<|im_start|>{message['role']}\n", False), (f"{content}<|im_end|>", own), ("\n", False)]
    return pieces


@dataclass(frozen=True)
class Family:
    """A template, its tokenizer's special tokens, and the renderer written by hand."""

    name: str
    template: str
    special: tuple[str, ...]
    pieces: Callable[[Messages], Pieces]
    eos: str

    def tokenizer(self, *, trims_offsets: bool = False) -> PreTrainedTokenizerFast:
        bos = "<s>" if "<s>" in self.special else None
        return byte_tokenizer(
            self.template, special=self.special, bos=bos, eos=self.eos, pad=self.eos, trims_offsets=trims_offsets
        )


FAMILIES = (
    Family("chatml", CHATML, ("<|im_start|>", "<|im_end|>"), chatml_pieces, "<|im_end|>"),
    Family("llama", LLAMA, ("<s>", "</s>", "<|start|>", "<|end|>", "<|eot|>"), llama_pieces, "</s>"),
    Family("gemma", GEMMA, ("<s>", "</s>", "<turn>", "</turn>"), gemma_pieces, "</s>"),
    Family("mistral", MISTRAL, ("<s>", "</s>"), mistral_pieces, "</s>"),
    Family("qwen", QWEN, ("<|im_start|>", "<|im_end|>", "<think>", "</think>"), qwen_pieces, "<|im_end|>"),
)
