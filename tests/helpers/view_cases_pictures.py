"""An episode with one image in the question and one from a tool."""

from vision_cases import make_codec, make_image

from rally.types import (
    Episode,
    Generation,
    Segment,
    StopReason,
    Task,
    ToolCall,
    ToolResponse,
    ToolResult,
    ToolStatus,
    Turn,
)


def picture_episode(sample: int, images: bool = True) -> Episode:
    codec = make_codec()
    first, second = make_image(1), make_image(2)
    content = [{"type": "image", "image": first}, {"type": "text", "text": "What is this?"}] if images else "Hm?"
    question = {"role": "user", "content": content}
    seen = [{"type": "image", "image": second}, {"type": "text", "text": "closer"}] if images else "closer"
    prompt, told = codec.prompt([question]), codec.delta([{"role": "tool", "content": seen}])
    said = [codec.encode_assistant({"role": "assistant", "content": f"say {sample}"}) for _ in range(2)]
    segment = Segment(prompt_ids=prompt.ids, images=prompt.images).append_sampled(_sampled(said[0]))
    segment = segment.append_observed(*told).append_sampled(_sampled(said[1]))
    call = ToolCall(name="image_zoom_in_tool", arguments={"bbox_2d": [0, 0, 9, 9]}, id="call_0")
    response = ToolResponse(text="closer", image=[second] if images else None)
    result = ToolResult(call=call, status=ToolStatus.OK, response=response)
    ends = [len(said[0]), len(said[0]) + len(told.ids), len(segment.response_ids)]
    turns = (
        Turn(role="assistant", text="look", end=ends[0], tool_calls=(call,), finish="stop"),
        Turn(role="tool", text="closer", start=ends[0], end=ends[1], tool_results=(result,)),
        Turn(role="assistant", text="noise", start=ends[1], end=ends[2], finish="stop"),
    )
    task = Task(id="t:0", data_source="noise", prompt=(question,), row={"images": [first] if images else []})
    return Episode(
        id=f"t000001-00000-{sample}",
        group="t000001-00000",
        task=task,
        stop_reason=StopReason.STOP,
        segments=(segment,),
        turns=turns,
        reward=1.0,
        step=1,
        timings={"started": 1_763_200_000.0, "total": 0.1},
    )


def _sampled(ids: tuple[int, ...]) -> Generation:
    return Generation(ids=ids, logprobs=(-0.5,) * len(ids), finish="stop")
