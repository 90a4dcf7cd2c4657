"""Hugging Face folders of small random models with configuration and tokenizer, written without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "then", "it", "was", "quick"]
WORDS += ["brown", "lazy", "red", "small", "big"]
TEXTS = ["the cat sat on the mat", "a quick brown dog ran and then it sat under the tree", "it was red"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def write_tokenizer(folder: Path, encoder: bool) -> int:
    """Write a tokenizer and return its size.

    encoder: words with [CLS] and [SEP], otherwise byte pairs for a decoder.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if encoder:
        vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False
        )
        tokenizer.train_from_iterator(TEXTS, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="[CLS]",
        eos_token="[SEP]",
        model_max_length=64,
    ).save_pretrained(folder)
    return int(tokenizer.get_vocab_size())


def write_bert(folder: Path, architecture: str = "BertModel", **config: Any) -> Path:
    """Write a BERT with two layers; `architecture` is its class in transformers."""
    import torch
    import transformers

    size = write_tokenizer(folder, encoder=True)
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(
        transformers.BertConfig(
            vocab_size=size,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=64,
            initializer_range=0.2,
            **config,
        )
    )
    model.eval().save_pretrained(folder)
    return folder


def write_sentence_encoder(folder: Path) -> Path:
    """Write a BERT as sentence-transformers saves it, with mean pooling and normalization."""
    write_bert(folder)
    kind = "sentence_transformers.models."
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": place, "type": kind + name}
        for number, (name, place) in enumerate(places.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32, "do_lower_case": False}))
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    for place, said in (("1_Pooling", pooling), ("2_Normalize", {})):
        (folder / place).mkdir()
        (folder / place / "config.json").write_text(json.dumps(said))
    return folder


def write_llama(folder: Path) -> Path:
    """Write a Llama with two layers, head size 16 and two query heads per key head.

    Large random weights (initializer_range=0.2) make greedy text vary.
    """
    import torch
    import transformers

    size = write_tokenizer(folder, encoder=False)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=size,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=128,
            max_position_embeddings=256,
            initializer_range=0.2,
            bos_token_id=2,
            eos_token_id=3,
            pad_token_id=0,
        )
    )
    model.eval().save_pretrained(folder)
    return folder


def write_t5(folder: Path) -> Path:
    """Write a T5 with two encoder and two decoder layers."""
    import torch
    import transformers

    size = write_tokenizer(folder, encoder=True)
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=size, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).eval().save_pretrained(folder)
    return folder
