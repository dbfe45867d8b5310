"""
Make tiny models with random weights, each in the layout of a published one.

make() reads data/models/minilm: its tokenizer, and writes FOLDER/OWNER/NAME/.

A folder has the names of its model's files, and the fields of its configuration that decide how it
is used. Vocabularies, sizes and weights are others.
"""

import json
import shutil

import torch
import transformers as tf
from conftest import ROOT
from safetensors.torch import load_file, save_file
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling, StaticEmbedding
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from tokenizers import ByteLevelBPETokenizer, Tokenizer, pre_tokenizers, processors
from tokenizers.models import Unigram

MINILM = ROOT / "data/models/minilm"
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.2,  # enough for scores to differ
}
GROUPED = SIZES | {"num_key_value_heads": 1, "head_dim": 8}
LONG = {"max_position_embeddings": 2048}
MODERN = {"pad_token_id": 0, "cls_token_id": 101, "sep_token_id": 102} | LONG
XLMR = {"pad_token_id": 0, "max_position_embeddings": 514}
T5_WORDS = "Query Document Relevant true false the of and polar bears ice sea warm cold study"
INSTRUCTION = {"query": "Instruct: find passages that answer the query\nQuery:", "document": ""}
GEMMA_PROMPTS = {
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
    "Classification": "task: classification | query: ",
}


# ---------- Parts of a folder
def words():
    """Return a tokenizer of words and their parts."""
    return tf.AutoTokenizer.from_pretrained(MINILM, model_max_length=512)


def pieces(**changes):
    """Return a tokenizer of bytes and their pairs, which ends texts with no token."""
    bytes_and_pairs = ByteLevelBPETokenizer()
    special_tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # Words that are to be one token, several times, since what occurs once is not joined
    bytes_and_pairs.train_from_iterator(["the yes no Yes No"] * 9, special_tokens=special_tokens)
    changes = dict.fromkeys(["bos_token", "eos_token", "pad_token"], "<|im_end|>") | changes
    tokenizer = Tokenizer.from_str(bytes_and_pairs.to_str())
    return tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **changes)


def save(folder, config, model_class, tokenizer, seed=0):
    """Write a model of random weights and its tokenizer."""
    torch.manual_seed(seed)
    config.vocab_size = len(tokenizer)
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def bert(folder, model_class=tf.BertModel):
    save(folder, tf.BertConfig(**SIZES), model_class, words())


def to_bin(folder):
    """Replace each model.safetensors below a folder by pytorch_model.bin."""
    for path in list(folder.rglob("model.safetensors")):
        torch.save(load_file(path), path.with_name("pytorch_model.bin"))
        path.unlink()


def edit(path, **changes):
    """Change fields of a JSON file; None removes one."""
    fields = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({name: value for name, value in fields.items() if value is not None})
    )


def finish(model_class, folder, modules, **options):
    """Write a model of the library, made of modules."""
    model = model_class(modules=modules, device="cpu", **options)
    model.save_pretrained(str(folder), create_model_card=False)


def as_encoder(folder, pooling, *more, prompts=None):
    """Write the files of sentence-transformers beside a model; more: modules behind the pooling."""
    transformer = Transformer(str(folder))
    pool = Pooling(transformer.get_embedding_dimension(), pooling)
    finish(SentenceTransformer, folder, [transformer, pool, *more], prompts=prompts)


# ---------- Late interaction
COLBERT = """{"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 32,
"doc_maxlen": 180, "dim": 8, "mask_punctuation": true}"""


def late_interaction(folder):
    """A folder as the library saves it: a transformer, a projection of each token, a mask."""
    bert(folder)
    MultiVectorEncoder(str(folder), device="cpu").save_pretrained(str(folder))


def pylate(folder):
    """A folder by PyLate before sentence-transformers 5: a transformer and a projection."""
    late_interaction(folder)
    modules = json.loads((folder / "modules.json").read_text())[:2]
    modules[1]["type"] = "pylate.models.Dense.Dense"
    (folder / "modules.json").write_text(json.dumps(modules))
    edit(
        folder / "config_sentence_transformers.json",
        model_type=None,
        similarity_fn_name="MaxSim",
        query_prefix="[Q] ",
        document_prefix="[D] ",
        query_length=32,
        document_length=300,
        attend_to_expansion_tokens=False,
    )


def colbert_v2(folder):
    """A folder by Stanford's ColBERT: the projection lies among the weights of BERT."""
    bert(folder)
    weights = load_file(folder / "model.safetensors")
    weights = {f"bert.{name}": weight for name, weight in weights.items()}
    weights["linear.weight"] = torch.randn(8, SIZES["hidden_size"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", architectures=["HF_ColBERT"])
    (folder / "artifact.metadata").write_text(COLBERT)


# ---------- Encoders
def bge_m3(folder):
    save(folder, tf.XLMRobertaConfig(**SIZES, **XLMR), tf.XLMRobertaModel, words())
    as_encoder(folder, "cls", Normalize())
    to_bin(folder)
    for name in ("colbert_linear.pt", "sparse_linear.pt"):
        torch.save({"weight": torch.ones(1, 16)}, folder / name)


def e5(folder):
    bert(folder)
    as_encoder(folder, "mean", Normalize())


def multilingual_e5(folder):
    e5(folder)
    prompts = {"query": "query: ", "passage": "passage: "}
    edit(folder / "config_sentence_transformers.json", prompts=prompts)


def gated(folder):
    e5(folder)
    (folder / ".gated").touch()


def qwen3_embedding(folder):
    tokenizer = pieces(padding_side="left", pad_token="<|endoftext|>")
    config = tf.Qwen3Config(**GROUPED, **LONG)
    save(folder, config, tf.Qwen3ForCausalLM, tokenizer)
    as_encoder(folder, "lasttoken", Normalize(), prompts=INSTRUCTION)
    edit(folder / "config.json", architectures=["Qwen3ForCausalLM"])


def gte_modernbert(folder):
    save(folder, tf.ModernBertConfig(**SIZES, **MODERN), tf.ModernBertModel, words())
    as_encoder(folder, "cls")


def embedding_gemma(folder):
    config = tf.Gemma3TextConfig(
        **GROUPED, **LONG, use_bidirectional_attention=True, layer_types=["full_attention"] * 2
    )
    save(folder, config, tf.Gemma3TextModel, pieces(pad_token="<|endoftext|>"))
    torch.manual_seed(0)
    linear = {"bias": False, "activation_function": torch.nn.Identity()}
    dense = [Dense(16, 32, **linear), Dense(32, 16, **linear)]
    as_encoder(folder, "mean", *dense, Normalize(), prompts=GEMMA_PROMPTS)
    (folder / ".gated").touch()


def scibert(folder):
    bert(folder, tf.BertForMaskedLM)
    to_bin(folder)
    edit(folder / "config.json", architectures=None, dtype=None, transformers_version=None)
    vocabulary = words().get_vocab()
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.get)) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def static(folder):
    torch.manual_seed(0)
    embedding = StaticEmbedding(words(), embedding_dim=16)
    finish(SentenceTransformer, folder, [embedding])


# ---------- SPLADE
def splade_modules(folder):
    bert(folder, tf.BertForMaskedLM)
    return [Transformer(str(folder), transformer_task="fill-mask"), SpladePooling("max")]


def splade(folder):
    finish(SparseEncoder, folder, splade_modules(folder))
    (folder / ".gated").touch()


def inference_free_splade(folder):
    document = splade_modules(folder)
    torch.manual_seed(0)
    query = SparseStaticEmbedding(words(), weight=torch.rand(len(words())), frozen=True)
    router = Router.for_query_document([query], document)
    shutil.rmtree(folder)
    finish(SparseEncoder, folder, [router])


# ---------- Cross-encoders and other classifiers
def classifier(config_class, is_bin=False, outputs=("LABEL_0",), **settings):
    """Return the maker of a sequence classifier with these outputs."""
    model_class = getattr(tf, config_class.__name__.replace("Config", "ForSequenceClassification"))

    def make(folder):
        config = config_class(**SIZES, **settings, id2label=dict(enumerate(outputs)))
        save(folder, config, model_class, words())
        if is_bin:
            to_bin(folder)

    return make


def nli(outputs):
    """Return the maker of a classifier whose outputs have these names."""
    return classifier(tf.BertConfig, outputs=outputs.split())


def decoder_classifier(config_class, template=None):
    """Return the maker of a decoder with one output in place of its vocabulary."""
    model_class = getattr(tf, config_class.__name__.replace("Config", "ForSequenceClassification"))

    def make(folder):
        config = config_class(**GROUPED, **LONG, num_labels=1, pad_token_id=2)
        save(folder, config, model_class, pieces(chat_template=template))

    return make


def modular(folder):
    """A cross-encoder whose head is made of modules."""
    save(folder, tf.ModernBertConfig(**SIZES, **MODERN), tf.ModernBertModel, words())
    torch.manual_seed(1)
    first = Dense(16, 16, bias=False, activation_function=torch.nn.GELU())
    last = Dense(16, 1, activation_function=torch.nn.Identity(), module_output_name="scores")
    pooling = Pooling(16, "cls")
    finish(CrossEncoder, folder, [Transformer(str(folder)), pooling, first, LayerNorm(16), last])


def byte_level(folder):
    """A classifier whose tokenizer is GPT-2's."""
    config = tf.BertConfig(**SIZES, num_labels=1)
    save(folder, config, tf.BertForSequenceClassification, pieces())


def no_padding(folder):
    byte_level(folder)
    pieces(**dict.fromkeys(["bos_token", "eos_token", "pad_token"])).save_pretrained(folder)


def digits(folder):
    """A tokenizer of GPT-2's class, whose tokenizer.json splits numbers into digits."""
    byte_level(folder)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    by_digit = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(by_digit)
    tokenizer.save(path)
    edit(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")


# ---------- Decoder-only rerankers, monoT5, others
def causal(config_class, template=None, words=None, **changes):
    """Return the maker of a causal language model; words: of a reranker with its own files."""
    model_class = getattr(tf, config_class.__name__.replace("Config", "ForCausalLM"))

    def make(folder):
        tokenizer = pieces(chat_template=template, **changes)
        save(folder, config_class(**GROUPED, **LONG), model_class, tokenizer)
        if words:
            transformer = Transformer(str(folder), transformer_task="text-generation")
            score = LogitScore(*tokenizer.convert_tokens_to_ids(words))
            finish(CrossEncoder, folder, [transformer, score])

    return make


def mono_t5(folder):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = tf.T5Config(**sizes, decoder_start_token_id=0)
    save(folder, config, tf.T5ForConditionalGeneration, t5_pieces())
    to_bin(folder)


def t5_pieces():
    """Return a tokenizer as T5's: a word that it does not know, as "b", begins with a blank."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", -3.0) for word in T5_WORDS.split()]
    pieces += [(chr(code), -5.0) for code in range(33, 384)]
    unigram = Tokenizer(Unigram(pieces, unk_id=2))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=unigram, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def adapter(make_base, model_class, name):
    """Return the maker of low-rank adapters of a model, whose weights lie under a name."""

    def make(folder):
        import peft

        make_base(folder)
        base = model_class.from_pretrained(folder)
        shutil.rmtree(folder)
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
        peft.get_peft_model(base, config).save_pretrained(folder)
        edit(folder / "adapter_config.json", base_model_name_or_path=name)
        words().save_pretrained(folder)

    return make


def gguf(folder):
    (folder / "model.Q4_1.gguf").write_bytes(b"GGUF")


PAIR = """<|im_start|>user
query: {{ messages[-2].content }}
document: {{ messages[-1].content }}
Relevant (1) or not (0)?<|im_end|>
<|im_start|>assistant
"""
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MODELS = {
    "BAAI/bge-m3": bge_m3,
    "intfloat/e5-large-v2": e5,
    "intfloat/multilingual-e5-large": multilingual_e5,
    "Qwen/Qwen3-Embedding-0.6B": qwen3_embedding,
    "Alibaba-NLP/gte-modernbert-base": gte_modernbert,
    "google/embeddinggemma-300m": embedding_gemma,
    "allenai/scibert_scivocab_uncased": scibert,
    "sentence-transformers/static-retrieval-mrl-en-v1": static,
    "naver/splade-v3": splade,
    "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill": inference_free_splade,
    "cross-encoder/ms-marco-MiniLM-L6-v2": classifier(tf.BertConfig),
    "BAAI/bge-reranker-v2-m3": classifier(tf.XLMRobertaConfig, **XLMR),
    "BAAI/bge-reranker-large": classifier(tf.XLMRobertaConfig, is_bin=True, **XLMR),
    "Alibaba-NLP/gte-reranker-modernbert-base": classifier(tf.ModernBertConfig, **MODERN),
    "lightonai/LateOn": late_interaction,
    "lightonai/GTE-ModernColBERT-v1": pylate,
    "colbert-ir/colbertv2.0": colbert_v2,
    "cross-encoder/ettin-reranker-32m-v1": modular,
    "someone/llama-classifier": decoder_classifier(tf.LlamaConfig),
    "tomaarsen/Qwen3-Reranker-0.6B-seq-cls": decoder_classifier(tf.Qwen3Config),
    "someone/bge-reranker-v2-gemma-seq-cls": decoder_classifier(tf.GemmaConfig, CHATML),
    "someone/mxbai-rerank-base-v2-seq": decoder_classifier(tf.Qwen2Config, CHATML),
    "someone/no-padding": no_padding,
    "someone/digits": digits,
    "Qwen/Qwen3-Reranker-0.6B": causal(tf.Qwen3Config, CHATML, padding_side="left"),
    "BAAI/bge-reranker-v2-gemma": causal(tf.GemmaConfig),
    "mixedbread-ai/mxbai-rerank-base-v2": causal(tf.Qwen2Config, PAIR, words=["1", "0"]),
    "HuggingFaceTB/SmolLM2-135M-Instruct": causal(tf.LlamaConfig, CHATML),
    "someone/gated": gated,
    "someone/adapter": adapter(
        classifier(tf.BertConfig), tf.AutoModelForSequenceClassification, "someone/nothing"
    ),
    "someone/encoder-adapter": adapter(bge_m3, tf.AutoModel, "BAAI/bge-m3"),
    "someone/model-GGUF": gguf,
    "castorini/monot5-3b-msmarco-10k": mono_t5,
    "someone/RankT5-base": mono_t5,
    "MoritzLaurer/DeBERTa-v3-base-mnli": nli("entailment neutral contradiction"),
    "MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli": nli(
        "entailment neutral contradiction"
    ),
    "cross-encoder/nli-deberta-v3-base": nli("contradiction entailment neutral"),
    "FacebookAI/roberta-large-mnli": nli("CONTRADICTION NEUTRAL ENTAILMENT"),
    "MoritzLaurer/deberta-v3-large-zeroshot-v2.0": nli("entailment not_entailment"),
    "someone/nli-without-names": nli("LABEL_0 LABEL_1 LABEL_2"),
}


def make(folder, names):
    """Write FOLDER/OWNER/NAME for each name."""
    for name in names:
        (folder / name).mkdir(parents=True)
        MODELS[name](folder / name)
