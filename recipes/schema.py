"""The recipe: one typed YAML, the only configuration path.

Sections `target, data, head, train, eval, export`. Unknown keys are errors with the nearest valid name. The `head` section stays open:
its fields are the head file's own `Config` (heads/eagle3.py and its neighbours), validated before any long work by `heads.head_config`.
A relative path is relative to the recipe's folder, except `run`: that one, like its default runs/NAME, is relative to the working directory.
`--set section.key=value` overrides a value; the value is parsed as YAML, a path in it means what it would mean in the file. (Evaluations
have no recipe file of the user's: there a path in `--set eval.prompts=` is relative to the working directory, as in `--prompts`.)
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class RecipeError(ValueError):
    """Bad input that the user can mend: the command prints its one line and exits with 2."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Geometry(Section):
    """The target's shape: what planning, head building and checkpoints need without loading the target."""

    model_type: str = "llama"
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = Field(description="rows of the target's lm_head (may exceed the tokenizer)")
    max_positions: int
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = Field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    tie_word_embeddings: bool = False


class TargetSection(Section):
    name: str = Field(description="named target (smollm2-135m), Hub id, folder, or path of a .gguf file")
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trust_remote_code: bool = False
    chat_template: str | None = Field(None, description="path of a jinja file, for a tokenizer that has no chat template")
    geometry: Geometry | None = None


# A draft has no more tokens, and a tree no more nodes, whoever makes it.
MOST_DRAFTED = 256
Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ServersSection(Section):
    """OpenAI-compatible servers that answer the prompts instead of our own decoder."""

    urls: list[str] = Field(min_length=1, description="each up to and with /v1: http://node1:8000/v1")
    model: str | None = Field(None, description="the name it is served under; None: the only one")
    concurrency: int = Field(64, ge=1, description="prompts under way at each server")
    retries: int = Field(5, ge=0, description="of a prompt that times out or meets a server's error; a busy or absent server costs none")
    timeout_s: float = Field(600, gt=0, description="seconds for one answer")
    patience_s: float = Field(600, gt=0, description="seconds without an answer from any server before the run stops (and can be resumed)")
    api_key_env: str = Field("OPENAI_API_KEY", description="environment variable with the key, if the servers want one; the key is never written")
    logprobs: bool = Field(False, description="keep the log-probability of each answer token, as the server reports it")


class DataSection(Section):
    prompts: str | list[str] = Field("builtin", description="'builtin', JSONL/Parquet files, a Hub data set (org/name[/config][:split]), or a list")
    streaming: bool = Field(False, description="read Hub data sets as they come, without a copy on disk")
    max_records: int | None = Field(None, ge=1, description="of each source, read the first so many records; None: all")
    overlap_words: int | None = Field(13, ge=1, description="leave out prompts sharing so many words in a row with one of eval.prompts; None: none")
    per_category: int | None = Field(None, ge=1, description="at most so many prompts of a category")
    limit: int | None = Field(None, ge=1, description="how many prompts, spread evenly over the categories")
    system: str | None = Field(None, description="system prompt for conversations that have none")
    max_prompt_tokens: int = Field(512, ge=1)
    min_prompt_tokens: int = Field(1, ge=1)
    max_new_tokens: int = Field(192, ge=1)
    temperature: Temperature | Annotated[list[Temperature], Field(min_length=1)] = Field(0.0, description="one, or a mix of which each row gets one")
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    batch_size: int = Field(32, ge=1)
    shard_rows: int = Field(64, ge=1, description="rows of one shard: the unit of resuming")
    features: Literal["capture", "online"] = Field("capture", description="capture: stored while generating; online: a target forward in training")
    states: Literal["fp16", "fp8", "int8"] = Field("fp16", description="how captured states are kept: fp8 and int8 take half the disk")
    taps: Annotated[list[int | Literal["final"]], Field(min_length=1)] | None = Field(
        None, description="states to capture, the union of what several heads read; None: this head's")
    rows: str | None = Field(None, description="another run's folder, or its distill folder: train on its rows instead of making them again")
    drop_loops: bool = Field(True, description="cut an answer where a loop begins")
    draft: str | None = Field(None, description="what drafts while this process answers: ngram, suffix, a head's folder, a smaller model; the "
                                                "answers are the same, sooner where the batch leaves the device idle")
    draft_gamma: int = Field(4, ge=1, le=MOST_DRAFTED, description="tokens it drafts a round")
    servers: ServersSection | None = Field(None, description="servers that answer, with the target's weights; None: this process does")
    seed: int = 0

    @model_validator(mode="after")
    def _states(self) -> DataSection:
        if self.servers is not None and self.features == "capture":
            raise ValueError("data.features is capture, and servers return no states: set data.features: online")
        if self.servers is not None and self.draft is not None:
            raise ValueError("data.draft is for answers by this process; servers draft by their own settings: leave data.draft or data.servers out")
        return self


class UnrollStage(Section):
    until: float = Field(description="this stage lasts until this fraction of the steps", gt=0, le=1)
    steps: int = Field(ge=1, description="unroll steps J (training-time test)")


LOSSES = Literal["soft_ce", "ce", "kl", "reverse_kl", "tv", "lk", "lk_hybrid", "topk", "smooth_l1", "confidence"]


# An adapter's rank: a wider one is larger than what it adapts. And alpha, with which the product stays a float32.
MOST_RANK, MOST_ALPHA = 16384, 1e6


class LoraSection(Section):
    """Medusa-2 (arXiv 2401.10774 §2.2.2 and §2.3.2): a LoRA adapter on the target (arXiv 2106.09685), trained with the head, which reads the adapted
    target's states. loss = head_weight · the head's loss + KL(target without the adapter ‖ with it), in nats a token, over the whole vocabulary,
    where train.supervise lets the head learn. What is decoded with such a head is the tuned target."""

    rank: int = Field(32, ge=1, le=MOST_RANK)
    alpha: float = Field(16.0, gt=0, le=MOST_ALPHA, description="the adapter's product is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="of the adapter's input. The paper has 0.05; above 0 the result depends on the number of "
                                                        "processes and on micro_batch_tokens (resuming stays exact)")
    target_modules: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="names of linear layers, as peft takes them; None: all of the decoder's. Never lm_head, which the head borrows")
    lr: float | None = Field(None, ge=0, description="the adapter's peak rate (AdamW), on the same schedule; None: train.lr / 4")
    head_weight: float = Field(0.2, gt=0, description="of the head's loss, beside the KL's 1")
    head_warmup: float = Field(0.0, ge=0, le=1, description="fraction of the steps in which head_weight rises from 0")


class TrainSection(Section):
    epochs: float = Field(3.0, gt=0)
    steps: int | None = Field(None, ge=1, description="optimizer steps; overrides epochs")
    batch_tokens: int = Field(4096, ge=1, description="tokens of one global batch (one optimizer step)")
    micro_batch_tokens: int = Field(2048, ge=1, description="tokens one process forwards at once; the rest is gradient accumulation")
    max_len: int = Field(2048, ge=2, description="longer rows are cut, and counted")
    unroll: list[UnrollStage] = Field(default_factory=lambda: [UnrollStage(until=1.0, steps=4)])
    loss_decay: float = Field(0.8, gt=0, le=1)
    loss: dict[LOSSES, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        {"soft_ce": 1.0}, min_length=1, description="a weighted sum; see heads/losses.py")
    supervise: Literal["answers", "all"] = "answers"
    normalise: Literal["sequence", "token"] = "sequence"
    drop_out_of_vocab: bool = Field(False, description="leave slots whose true token is outside the draft vocabulary out of the loss")
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="muon: Muon for the matrices, AdamW for the rest")
    lr: float = Field(1e-4, gt=0)
    muon_lr: float = Field(0.02, gt=0, description="peak rate of the matrices under muon; follows the same schedule")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(0.5, gt=0)
    warmup: float = Field(0.05, ge=0, lt=1, description="fraction of the steps")
    schedule: Literal["wsd", "cosine", "constant"] = "wsd"
    decay: float = Field(0.3, ge=0, le=1, description="wsd: fraction of the steps in which the rate falls")
    min_lr: float = Field(0.05, ge=0, le=1, description="final rate as a fraction of lr")
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    feature_noise: float = Field(0.0, ge=0)
    loss_chunk: int = Field(2048, ge=1, description="slots whose draft logits exist at one time")
    checkpoint_every: int = Field(200, ge=1, description="optimizer steps between resumable checkpoints")
    keep: int = Field(2, ge=1)
    log: list[Literal["jsonl", "tensorboard", "wandb"]] = ["jsonl"]
    log_every: int = Field(10, ge=1)
    seed: int = 0
    lora: LoraSection | None = Field(None, description="tune the target along with the head; then lossless means: the tuned target's text")

    @model_validator(mode="after")
    def _stages(self) -> TrainSection:
        ends = [s.until for s in self.unroll]
        if not ends or ends != sorted(ends) or ends[-1] != 1.0:
            raise ValueError(f"train.unroll: 'until' must rise and end at 1.0, found {ends}")
        if self.lora is not None and self.feature_noise:
            raise ValueError("train.feature_noise is added to stored states, and with train.lora the head reads none: leave one of them out")
        return self


class NgramSection(Section):
    prompt_lookup_min: int = Field(2, ge=1)
    prompt_lookup_max: int = Field(5, ge=1)
    gamma: int = Field(8, ge=1, le=MOST_DRAFTED, description="tokens copied per round")

    @model_validator(mode="after")
    def _sizes(self) -> NgramSection:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min {self.prompt_lookup_min} is more than prompt_lookup_max {self.prompt_lookup_max}")
        return self


class SuffixSection(Section):
    """Named as the arguments of inference/drafters/suffix.py, which says what they do."""

    max_tree_depth: int = Field(48, ge=2)
    max_cached_requests: int = Field(10000, ge=0)
    max_spec_factor: float = Field(2.0, gt=0)
    min_token_prob: float = Field(0.1, ge=0, le=1)
    min_score: float | None = Field(None, ge=0, description="None: 0 alone, 2 before another drafter")
    max_cached_tokens: int = Field(131072, ge=1)
    gamma: int = Field(8, ge=1, le=MOST_DRAFTED, description="tokens copied per round")


DRAFTERS = Literal["none", "ngram", "suffix", "head", "composite", "draft_model", "mtp"]


class EvalSection(Section):
    prompts: str | list[str] = "builtin"
    per_category: int | None = Field(None, ge=1)
    categories: list[str] | None = Field(None, min_length=1)
    max_new_tokens: int = Field(96, ge=1)
    drafters: list[DRAFTERS] = Field(["none", "ngram", "head", "composite"], min_length=1)
    draft_model: str | None = Field(None, description="drafter draft_model: Hub id, folder or named target of a smaller model")
    copy_first: Literal["ngram", "suffix"] = Field("ngram", description="drafter composite: what copies before the head drafts")
    tree: str = Field("chain", description="what head, draft_model, mtp (and suffix, if dynamic) grow; see inference/shapes.py")
    gamma: int | Literal["auto"] = Field("auto", description="draft length of the timed runs; auto: chosen from the measured costs")
    tau_gamma: int = Field(4, ge=1, le=MOST_DRAFTED, description="draft length at which the head's τ is reported")
    costs: bool = Field(True, description="measure what drafting and verifying cost here; false: acceptance only, gamma must be given")
    draft_weights: Literal["auto", "float32", "int8"] = Field("auto", description="auto: int8 on CPUs that can, else the target's dtype")
    ngram: NgramSection = NgramSection()
    suffix: SuffixSection = SuffixSection()
    temperature: float = Field(0.0, ge=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    no_repeat_ngram_size: int = Field(0, ge=0)
    min_new_tokens: int = Field(0, ge=0)
    ignore_eos: bool = Field(False, description="go on behind end tokens, as engines' benchmarks do")
    lossy: Literal["typical"] | None = Field(None, description="accept what the target would not have drawn; the report is stamped")
    batch_size: int = Field(1, ge=1)
    transformers_fraction: float = Field(1 / 3, ge=0, le=1, description="share of the prompts also run through transformers' generate")
    bootstrap: int = Field(2000, ge=100)
    seed: int = 0

    @model_validator(mode="after")
    def _model(self) -> EvalSection:
        if self.gamma != "auto" and not 1 <= self.gamma <= MOST_DRAFTED:
            raise ValueError(f"eval.gamma is {self.gamma}; wanted 'auto' or a draft length of 1 … {MOST_DRAFTED}")
        if self.gamma == "auto" and not self.costs:
            raise ValueError("eval.costs is false, and gamma auto is chosen by them: give a draft length (--gamma 4)")
        if ("draft_model" in self.drafters) != (self.draft_model is not None):
            wanted = f"add draft_model to drafters ({', '.join(self.drafters)})" if self.draft_model else "name it: draft_model: NAME"
            raise ValueError(f"drafter draft_model and the model that drafts belong together; {wanted}")
        return self


class ExportSection(Section):
    num_speculative_tokens: int | None = Field(None, ge=1)


class Recipe(Section):
    """A whole run. `Recipe.load` is the only way in."""

    run: str | None = Field(None, description="run folder, relative to the working directory; default runs/<name of the recipe>")
    target: TargetSection
    data: DataSection = DataSection()
    head: dict[str, Any] = Field(description="type: the file name in heads/, and that head's own options")
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    export: ExportSection = ExportSection()

    @classmethod
    def load(cls, path: str | os.PathLike[str], overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
        """Read, override, validate, make paths absolute. Raises RecipeError, one line, that says what to mend."""
        path = Path(path)
        raw = read_yaml(path)
        for item in overrides:
            apply_override(raw, item)
        recipe = validate(cls, raw, str(path))
        try:
            return recipe._resolved(path)
        except (OSError, ValueError, RuntimeError) as error:  # a name too long for a path, a NUL in it, the home of no one
            raise RecipeError(f"{path}: a value is no path: {' '.join(str(error).split())[:300]}") from None

    def _resolved(self, path: Path) -> Recipe:
        base = path.resolve().parent
        data = self.model_dump()
        for section in ("data", "eval"):
            value = data[section]["prompts"]
            items = [_absolute(v, base) for v in ([value] if isinstance(value, str) else value)]
            data[section]["prompts"] = items[0] if isinstance(value, str) else items
        data["target"]["name"] = _absolute(data["target"]["name"], base)
        if data["data"]["rows"]:
            data["data"]["rows"] = str((base / Path(data["data"]["rows"]).expanduser()).resolve())
        if data["eval"]["draft_model"]:
            data["eval"]["draft_model"] = _absolute(data["eval"]["draft_model"], base)
        kind, _, file = data["eval"]["tree"].partition(":")
        if kind == "static" and file.endswith(".json"):
            data["eval"]["tree"] = f"static:{_absolute(file, base)}"
        if data["target"]["chat_template"]:
            data["target"]["chat_template"] = _absolute(data["target"]["chat_template"], base)
        data["run"] = str(Path(data["run"] or Path("runs") / path.stem).absolute())
        return Recipe.model_validate(data)

    @property
    def run_dir(self) -> Path:
        if self.run is None:
            raise RecipeError("recipe has no run folder: load it with Recipe.load, or set run")
        return Path(self.run)

    def hash(self) -> str:
        """sha256 of the resolved recipe without the run folder, 16 hex digits."""
        return content_hash(self.model_dump(mode="json", exclude={"run"}))

    def dump(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def content_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode()).hexdigest()[:16]


def _absolute(value: str, base: Path) -> str:
    """A value that names an existing file or folder beside the recipe becomes absolute; names and Hub ids pass."""
    looks_local = value.startswith((".", "/", "~")) or value.endswith((".jsonl", ".parquet", ".gguf", ".json", ".jinja"))
    candidate = (base / Path(value).expanduser()).resolve()
    return str(candidate) if looks_local or candidate.exists() and "/" in value else value


class _Loader(yaml.SafeLoader):
    """safe_load in which 1e-4 is a number (YAML 1.1 calls it a string) and a key given twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(k, deep=True) for k, _ in node.value]
        twice = [k for i, k in enumerate(keys) if k in keys[:i]]
        if twice:
            raise RecipeError(f"line {node.start_mark.line + 1}: key {twice[0]!r} is given twice")
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    __import__("re").compile(r"^[-+]?(?:\d[\d_]*(?:\.[\d_]*)?[eE][-+]?\d+|\d[\d_]*\.[\d_]*|\.\d[\d_]*|\.inf|\.nan)$"),
    list("-+0123456789."),
)


def load_yaml(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecipeError):
        raise
    except (ValueError, TypeError, RecursionError) as error:  # a date like 2024-13-45, a node of another kind than its tag, [[[[…
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else [], n=1)
        raise RecipeError(f"no recipe at {path}" + (f"; did you mean {path.parent / near[0]}?" if near else "")) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from None
    try:
        raw = load_yaml(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    if not isinstance(raw, dict):
        raise RecipeError(f"{path} must be a mapping with the sections {', '.join(Recipe.model_fields)}; found {type(raw).__name__}")
    return raw


def apply_override(raw: dict[str, Any], item: str) -> None:
    key, sep, value = item.partition("=")
    parts = key.strip().split(".")
    if not sep or not all(parts):
        raise RecipeError(f"--set wants section.key=value, found {item!r}")
    node = raw
    for part in parts[:-1]:
        if node.get(part) is None:  # absent, or a section left empty in the file
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise RecipeError(f"--set {item}: {part!r} is not a section")
    try:
        node[parts[-1]] = load_yaml(value)
    except yaml.YAMLError:
        node[parts[-1]] = value


def validate(model: type[BaseModel], raw: Any, where: str) -> Any:
    """pydantic's errors as one line; an unknown key names its nearest neighbour."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise RecipeError(f"{where}: " + "; ".join(_explain(model, e) for e in error.errors())) from None


def _explain(model: type[BaseModel], error: Any) -> str:
    location = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        fields = _fields_at(model, error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), fields, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(sorted(fields))}"
        return f"unknown key {location!r}; {hint}"
    if error["type"] == "missing":
        return f"{location} is missing"
    found = "" if isinstance(error.get("input"), dict) else f" (found {error.get('input')!r})"  # a whole section would bury the message
    return f"{location}: {error['msg']}{found}"


def _fields_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    current: Any = model
    for part in path:
        field = current.model_fields.get(part) if isinstance(current, type) and issubclass(current, BaseModel) else None
        options = [field.annotation, *getattr(field.annotation, "__args__", ())] if field is not None else [current]
        current = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), current)
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []
