"""The tokenizer of the test models: every id has a text of its own, for any size of vocabulary."""

import itertools
import json
from pathlib import Path

SPECIAL_TOKENS = ("<pad>", "<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
"""Tokens of ids 0 to 5."""
PAD_ID, UNK_ID, BOS_ID, EOS_ID, IM_START_ID, STOP_ID = range(6)
"""Ids of the special tokens.  Generation ends at EOS_ID and at STOP_ID, unless a request says ``ignore_eos``."""

CHARACTERS = "\n\t" + "".join(map(chr, range(32, 127)))
"""Tokens of ids 6 to 102."""

LEAST_VOCAB = len(SPECIAL_TOKENS) + len(CHARACTERS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_vocabulary(size: int) -> list[str]:
    """The text of each id: special tokens, printable ASCII, then made-up words with a leading space."""
    syllables = [consonant + vowel for consonant in "bdfghjklmnprstvwz" for vowel in "aeiou"]
    words = (" " + "".join(parts) for n in itertools.count(2) for parts in itertools.product(syllables, repeat=n))
    return [*SPECIAL_TOKENS, *CHARACTERS, *itertools.islice(words, size - LEAST_VOCAB)]


def write_tokenizer(folder: Path, vocab: int, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for `vocab` tokens and sequences of up to `context`.

    ASCII text comes back from the ids as it went in; every other character becomes ``<unk>``.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    # Unigram with equal scores takes the split with the fewest tokens, and needs no merges as BPE would.
    pieces = [(text, 0.0 if text in SPECIAL_TOKENS else -1.0) for text in make_vocabulary(vocab)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=UNK_ID, byte_fallback=False))
    # Without a decoder, decode() puts spaces between the tokens. Fuse joins them; ByteFallback does nothing
    # here, but grammar backends look for it to see how tokens become bytes.
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "unk_token": SPECIAL_TOKENS[UNK_ID],
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
