"""Chat templates as models have them, over a tokenizer of bytes."""

from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import LlamaConfig, PreTrainedTokenizerFast

from gnomon.models.tokenizer import Tokenizer, wrap

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}<|body|>\n\n{{ m['content'] | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|body|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set note = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set note = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m['role'] == 'user' %}[INST] {% if loop.last %}{{ note }}{% endif %}{{ m['content'] }} "
    "[/INST]{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}<|head|>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|head|>model\n{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}<|User|>{{ m['content'] }}{% else %}<|Assistant|>"
    "{{ m['content'].split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.last %}<think>\n\n"
    "</think>\n\n{{ m['content'].split('</think>')[-1] }}{% elif m['role'] == 'assistant' %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN_THINKING = QWEN.partition("{% if enable_thinking")[0] + "<think>\n{% endif %}"
HARMONY = (
    "{% if messages[0]['role'] in ('system', 'developer') %}<|start|>developer<|message|>{{ messages[0]['content'] }}"
    "<|end|>{% endif %}{% for m in messages %}{% if m['role'] == 'user' %}<|start|>user<|message|>{{ m['content'] }}"
    "<|end|>{% elif m['role'] == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m['content'] }}"
    "{% if loop.last %}{{ eos_token }}{% else %}<|end|>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
VICUNA = (
    "{% for m in messages %}{% if m['role'] == 'user' %}USER: {{ m['content'] }} {% elif m['role'] == 'assistant' %}"
    "ASSISTANT: {{ m['content'] }}{{ eos_token }}{% else %}{{ m['content'] }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
ESCAPED = (
    "[{% for m in messages %}{\"role\": {{ m['role'] | tojson }}, \"content\": {{ m['content'] | tojson }}},"
    '{% endfor %}{% if add_generation_prompt %}{"role": "assistant", "content": {% endif %}'
)
MODELS = {
    "ChatML": CHATML,
    "Llama 3": LLAMA,
    "Mistral": MISTRAL,
    "R1": R1,
    "Qwen 3": QWEN,
    "Qwen 3 thinking": QWEN_THINKING,
    "gpt-oss": HARMONY,
    "Vicuna": VICUNA,
    "escaped": ESCAPED,
    "nothing but contents": PLAIN,
}
_SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|body|>", "<|User|>", "<|Assistant|>")
_HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>")


def tokenizer_of(template: str | None, **settings: Any) -> Tokenizer:
    """Return a tokenizer of bytes with this template."""
    backend = Backend(models.BPE(vocab={c: n for n, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*_SPECIAL, *_HARMONY)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **settings)
    fast.chat_template = template
    return wrap(fast, LlamaConfig(vocab_size=512))
