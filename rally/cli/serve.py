"""`rally serve`: the retrieval, sandbox and engine servers, which run until they are stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rally.cli.config_args import written_as
from rally.cli.console import quiet_console
from rally.sandbox import Isolation
from rally.types import RallyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rally.engines import EngineSettings
    from rally.engines.embedded.settings import NgramSpeculation, OptionNames
    from rally.services.admission import Served
    from rally.train.startup_check import Difference

app = typer.Typer(help="Run a server alone.", no_args_is_help=True)

TOKEN = "RALLY_ENGINE_TOKEN"
InFlight = Literal["keep", "recompute", "abort"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(help="A further name by which clients may call the server; may be repeated.", show_default=False),
]
MaxBody = Annotated[float, typer.Option(help="MiB of a request's body; larger ones are rejected.", min=0.01)]
NO_OPTIONS = "{}"
DEFAULT_SHARE, CPU_KV_BYTES = 0.5, 2 << 30
LONGEST_DEFAULT = 4096  # tokens; a model's own limit may be far more than memory can hold


@app.command()
def retrieval(
    index: Annotated[Path, typer.Argument(help="A folder written by `rally data index`.")],
    host: Annotated[str, typer.Option(help="Beyond this machine only with RALLY_RETRIEVAL_TOKEN set.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where clients ask.", min=1, max=65535)] = 8000,
    topk: Annotated[int, typer.Option(help="Hits per query when the client names no number.", min=1)] = 3,
    device: Annotated[str, typer.Option(help="Where a dense index is searched: cpu, cuda, cuda:1.")] = "cpu",
    allow_host: AllowHost = None,
    max_body_mb: MaxBody = 8,
) -> None:
    """Answer searches over HTTP, in the protocol of Search-R1 (POST /retrieve)."""
    from rally.retrieval import open_index
    from rally.services.http_server import check_exposure, check_free, serve
    from rally.track import RunConsole

    token = check_exposure(host, "RALLY_RETRIEVAL_TOKEN")
    check_free(host, port)
    if device != "cpu":  # torch is slow to import
        from rally.models.load import pick_device

        device = str(pick_device(device, "--device"))
    opened = open_index(index, device)
    if opened.kind == "bm25" and device != "cpu":
        raise RallyError(f"{index} has no vectors, so --device={device} has no effect; leave it out")

    def create() -> object:
        from rally.services.retrieval import create_app

        return create_app(opened, topk, token)

    RunConsole().note(f"{len(opened):,} passages ({opened.kind}) at http://{host}:{port}/retrieve")
    serve(create, host, port, allow_hosts=allow_host or (), max_body_mb=max_body_mb)


@app.command()
def sandbox(
    host: Annotated[str, typer.Option(help="Beyond this machine only with RALLY_SANDBOX_TOKEN set.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where clients ask.", min=1, max=65535)] = 8080,
    isolation: Annotated[Isolation, typer.Option(help="auto takes the strongest that runs here.")] = "auto",
    memory_mb: Annotated[int, typer.Option(help="Of one execution that asks for no limit itself.", min=1)] = 1024,
    max_concurrent: Annotated[int | None, typer.Option(help="At once; default twice the cores.", min=1)] = None,
    max_memory_mb: Annotated[int, typer.Option(help="The most that a request may ask for.", min=1)] = 4096,
    max_timeout: Annotated[float, typer.Option(help="The most seconds that a request may ask for.", min=0.1)] = 600.0,
    disk_mb: Annotated[int, typer.Option(help="Of the files of one execution, in memory.", min=1)] = 128,
    max_files: Annotated[int, typer.Option(help="Files of one execution.", min=1)] = 10_000,
    max_processes: Annotated[int, typer.Option(help="Processes and threads of one execution.", min=1)] = 64,
    max_output_kb: Annotated[int, typer.Option(help="Kept of each stream; the rest is counted.", min=1)] = 1024,
    allow_host: AllowHost = None,
    max_body_mb: MaxBody = 64,
) -> None:
    """Run code of strangers for tools and rewards, in the protocol of SandboxFusion (POST /run_code)."""
    from rally.sandbox import Limits, Sandbox, SandboxSettings
    from rally.services.http_server import check_exposure, check_free, serve

    token = check_exposure(host, "RALLY_SANDBOX_TOKEN")
    check_free(host, port)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    limits = Limits(
        memory_mb=memory_mb,
        disk_mb=disk_mb,
        files=max_files,
        processes=max_processes,
        output_bytes=max_output_kb << 10,
    )
    settings = SandboxSettings(isolation=isolation, limits=limits, max_concurrent=max_concurrent)

    running = Sandbox(settings)
    running.start_now()  # raise before listening if code cannot be isolated here

    def create() -> object:
        from rally.services.sandbox import Ceilings, create_app

        return create_app(running, token, Ceilings(memory_mb=max_memory_mb, timeout=max_timeout))

    serve(create, host, port, log_level="info", allow_hosts=allow_host or (), max_body_mb=max_body_mb)


@app.command()
def engine(
    model: Annotated[str, typer.Argument(help="A folder, a name on the hub, or a .gguf file.")],
    host: Annotated[str, typer.Option(help="Beyond this machine only with RALLY_ENGINE_TOKEN set.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where clients ask.", min=0, max=65535)] = 8100,
    name: Annotated[str | None, typer.Option(help="What clients call the model; default MODEL.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    dtype: Annotated[Dtype, typer.Option(help="auto is bfloat16 on a GPU that has it.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of a whole history; default the model's limit, at most 4096.", min=2)
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.", min=1)] = 64,
    max_requests: Annotated[int, typer.Option(help="Running and waiting; more are rejected.", min=1)] = 1024,
    memory: Annotated[
        float | None,
        typer.Option(
            help="Share of the free memory for the KV cache; default 0.5, and on a CPU at most 2 GiB.",
            min=0.01,
            max=0.99,
            show_default=False,
        ),
    ] = None,
    tool_format: Annotated[
        str, typer.Option(help="How the model writes tool calls; auto is what its chat template shows.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Of requests that bring none.")] = 0,
    tokenizer: Annotated[str | None, typer.Option(help="Where the tokenizer is; default MODEL.")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of one step.", min=1)] = 8192,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file to use instead of the model's own chat template.")
    ] = None,
    hidden_tools: Annotated[
        bool, typer.Option("--hidden-tools", help="Take tools that the chat template does not show to the model.")
    ] = False,
    allow_host: AllowHost = None,
    max_body_mb: MaxBody = 8,
    speculative_config: Annotated[
        str | None,
        typer.Option(help='Draft tokens, such as {"method": "ngram"}; the keys of rollout.speculative_config as JSON.'),
    ] = None,
    quantization: Annotated[
        Literal["fp8"] | None,
        typer.Option(help="fp8: compute linear layers in FP8, with 8-bit copies of their weights."),
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Compare the engine with the model's own forward first, unless weights are accepted.")
    ] = True,
    accept_weights: Annotated[bool, typer.Option(help="Let a training run replace the weights.")] = False,
    in_flight: Annotated[InFlight, typer.Option(help="What becomes of requests when they are replaced.")] = "keep",
    return_routes: Annotated[
        bool,
        typer.Option("--return-routes", help="Return the experts of tokens, for router replay."),
    ] = False,
    image_processor: Annotated[
        str | None,
        typer.Option(help="Take images over /generate, with the image processor of this model; default: only tokens."),
    ] = None,
    mm_processor_kwargs: Annotated[str, typer.Option(help="Options of the image processor, as JSON.")] = NO_OPTIONS,
    join: Annotated[
        Path | None,
        typer.Option(help="The folder of a training run that this server joins; implies --accept-weights."),
    ] = None,
) -> None:
    """Sample from a model over HTTP: token ids for other Rally processes, OpenAI's protocol for everybody else."""
    console = quiet_console()
    from rally.chat.formats import AUTO, get_format
    from rally.engines import EngineSettings
    from rally.engines.embedded.memory_plan import plan_words
    from rally.models.load import load_model, pick_device
    from rally.services.http_server import check_exposure, check_free, serve

    if tool_format != AUTO:
        get_format(tool_format)  # raise for an unknown name before the first request
    drafts = None if speculative_config is None else _drafts(speculative_config)
    if in_flight != "keep" and not accept_weights and join is None:
        raise RallyError(
            f"--in-flight={in_flight} has no effect where weights are never replaced; add --accept-weights or --join, "
            "or leave it out"
        )
    if mm_processor_kwargs != NO_OPTIONS and image_processor is None:
        raise RallyError(
            f"--mm-processor-kwargs={mm_processor_kwargs} has no effect without --image-processor; add it, or leave it "
            "out"
        )
    if quantization is not None:
        _check_fp8(model, device, dtype, accepts=accept_weights or join is not None)
    token = os.environ.get(TOKEN) or None
    if join is None:
        token = check_exposure(host, TOKEN)
    else:  # the run reads the token from the announcement
        accept_weights, token = True, token or secrets.token_urlsafe(24)
    own_url = None if join is None else _own_url(host, port, allow_host or ())
    if accept_weights and token is None:
        token = secrets.token_urlsafe(24)
        console.note(f"who may replace the weights must know this token; set {TOKEN}={token} where the run starts")
    check_free(host, port)
    module = load_model(model, device=pick_device(device, "--device"), dtype=dtype, option="MODEL")
    if image_processor is not None:
        _show_images(module, image_processor, tokenizer or model, mm_processor_kwargs)
    limit: int = getattr(module.config.get_text_config(), "max_position_embeddings", LONGEST_DEFAULT)
    settings = EngineSettings(
        max_model_len=max_model_len or min(limit, LONGEST_DEFAULT),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        memory_share=memory or DEFAULT_SHARE,
        max_kv_bytes=CPU_KV_BYTES if memory is None and module.device.type == "cpu" else None,
        in_flight=in_flight,
        return_routes=return_routes,
        seed=seed,
        speculation=drafts,
        quantization=quantization,
        option_names=_options(),
    )

    def create() -> object:
        from rally.services.engine import create_app

        served = replace(
            _served(module, tokenizer or model, settings, chat_template),
            name=name or model,
            tool_format=tool_format,
            max_requests=max_requests,
            hidden_tools=hidden_tools,
        )
        if tool_format != AUTO and served.tokenizer.chat_template:
            from rally.chat import ChatCodec

            if problem := ChatCodec(served.tokenizer, tool_format).format_problem("--tool-format"):
                raise RallyError(problem)
        if check and not accept_weights:  # a run compares the weights that it sends itself
            console.note(f"start-up check: {_checked(served, module)}")
        if served.engine.core.fp8 is not None:
            console.note(served.engine.core.fp8.words())
        plan = served.engine.core.memory_plan
        assert plan is not None
        console.note(f"memory: {plan_words(plan, settings)}")
        console.note(f"{name or model}, up to {settings.max_model_len:,} tokens, at http://{host}:{port}/v1")
        return create_app(served, token, accepts_weights=accept_weights)

    with _announced(join, own_url, token):
        serve(create, host, port, allow_hosts=allow_host or (), max_body_mb=max_body_mb)


def _check_fp8(model: str, device: str, dtype: str, *, accepts: bool) -> None:
    """Raise before weights are loaded if they cannot be served in FP8."""
    from rally.models import fp8
    from rally.models.load import load_model_config, pick_device, pick_dtype

    if accepts:
        raise RallyError(
            "--quantization=fp8 does not work with --accept-weights or --join: a run compares the samples of its "
            "servers with its own weights; leave one of them out"
        )
    chosen = pick_device(device, "--device")
    fp8.check_device(chosen, pick_dtype(dtype, chosen), "--quantization")
    if not model.endswith(".gguf"):  # slow to read; the engine checks it
        fp8.check_config(load_model_config(model, option="MODEL"), "--quantization")


def _show_images(module: PreTrainedModel, processor: str, tokenizer: str, options: str) -> None:
    """Attach the image preprocessing of the model at `processor`."""
    from rally.models.vision import set_patches
    from rally.models.vision_loading import patches_for

    try:
        chosen = json.loads(options)
        if not isinstance(chosen, dict):
            raise ValueError("it is no mapping")
    except ValueError as problem:
        raise RallyError(f"--mm-processor-kwargs={options} is not JSON of a mapping ({problem})") from None
    with written_as({"data.mm_processor_kwargs": "--mm-processor-kwargs"}):
        patches = patches_for(module.config, processor, chosen, tokenizer_path=tokenizer)
    if patches is None:
        raise RallyError(
            f"--image-processor={processor}: the model takes no images, or there is no preprocessor_config.json; leave "
            "it out"
        )
    set_patches(module, patches)


def _own_url(host: str, port: int, names: Sequence[str]) -> str:
    """The address by which a run reaches this server."""
    if port == 0 or (host in ("0.0.0.0", "::") and not names):
        raise RallyError("--join needs an address that the run can use; set --port, and --host or --allow-host")
    name = names[0] if names else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


@contextmanager
def _announced(run_dir: Path | None, url: str | None, token: str | None) -> Iterator[None]:
    """A block in which a run is told about this server; at its end the server leaves the run, also if a signal asks
    for it. uvicorn raises that signal again when it has ended, and by default it would end the process here."""
    if run_dir is None or url is None:
        yield
        return
    from rally.engines.remote import ServerAnnouncement, announce

    before = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    file = announce(run_dir, ServerAnnouncement(url, token))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _options() -> OptionNames:
    """The option names of `rally serve engine`, for error messages of its engine."""
    from rally.engines.embedded.settings import OptionNames

    length = "--max-model-len"
    return OptionNames(
        max_model_len=length,
        lengths=length,
        memory="--memory",
        torch_attention="--dtype=float32",
        speculation="--speculative-config",
        quantization="--quantization",
        routes="--return-routes",
    )


def _drafts(text: str) -> NgramSpeculation | None:
    """The settings that --speculative-config describes."""
    from pydantic import ValidationError

    from rally.config.rollout import SpeculativeConfig
    from rally.runs.build.rollout import speculation_of

    try:
        keys = SpeculativeConfig.model_validate_json(text)
    except ValidationError as error:
        [first, *_] = error.errors()
        problem = ": ".join([*map(str, first["loc"]), first["msg"]])
        raise RallyError(f"--speculative-config={text}: {problem}") from None
    if keys.prompt_lookup_min > keys.prompt_lookup_max:
        raise RallyError(f"--speculative-config={text}: prompt_lookup_min is more than prompt_lookup_max")
    if keys.method is None and keys.model_dump(exclude_defaults=True):
        raise RallyError(f'--speculative-config={text} has no effect without a method; add "method": "ngram"')
    return speculation_of(keys)


def _checked(served: Served, module: PreTrainedModel) -> Difference:
    """Compare the engine with the module's own forward on some text."""
    from rally.train.startup_check import check_rollout
    from rally.types import SamplingParams

    text = f"{engine.__doc__} {json.dumps({'name': 'calculator', 'arguments': {'expression': '12 * (3 + 4)'}})}"
    ids = [*served.tokenizer(text, add_special_tokens=False)["input_ids"]]
    advice = "serve it with vLLM or SGLang (--no-check serves it anyway)"
    prompts = (ids, ids[len(ids) // 2 :] or ids)
    with written_as({"use another rollout.name or another model": advice}):
        return asyncio.run(check_rollout(served.engine, module, prompts, SamplingParams(max_tokens=1), advice))


def _served(module: PreTrainedModel, path: str, settings: EngineSettings, chat_template: Path | None) -> Served:
    from rally.chat import ChatCodec
    from rally.engines import EmbeddedEngine
    from rally.models.load import check_vocabulary, load_tokenizer
    from rally.models.token_masks import Grammars
    from rally.services.admission import Served

    tokenizer = load_tokenizer(path, option="--tokenizer")
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template)
    check_vocabulary(module, tokenizer, (), "--tokenizer")

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids)))

    ends = getattr(module.generation_config, "eos_token_id", None) or tokenizer.eos_token_id
    eos_ids = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    stops = eos_ids if tokenizer.chat_template is None else ChatCodec(tokenizer, stop_ids=eos_ids).stop_ids
    grammars = Grammars(tokenizer, module.config.get_text_config().vocab_size, stops)
    return Served(
        engine=EmbeddedEngine(module, settings, decode=decode, grammars=grammars),
        tokenizer=tokenizer,
        name=path,
        eos_ids=eos_ids,
    )


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise RallyError(f"--chat-template={file} cannot be read ({problem}); name a Jinja file") from None
