"""Several answers at a time, each printed as it settles; one is ended before it is done."""

import asyncio

from unmask import LLM, AsyncEngine, SamplingParams
from unmask.problems import make_problems

SHORT = SamplingParams()
ENDLESS = SamplingParams(max_tokens=512, ignore_eos=True, threshold=2.0)  # never that sure: 512 passes


async def follow(engine: AsyncEngine, name: str, question: str, params: SamplingParams) -> None:
    """Print what settles, and how it ended."""
    prompt = {"messages": [{"role": "user", "content": question}]}
    async for chunk in engine.generate(prompt, params, request_id=name):
        if chunk.delta:
            print(f"{name}: {chunk.delta!r}")
        if chunk.output is not None:
            print(f"{name}: {chunk.output.outputs[0].finish_reason}")


async def serve() -> None:
    questions = [problem["question"] for problem in make_problems(7, 3, split="test")]
    async with AsyncEngine(LLM()) as engine:
        streams = [
            follow(engine, f"request {i}", text, params)
            for i, (text, params) in enumerate(zip(questions, (SHORT, ENDLESS, SHORT)))
        ]
        tasks = [asyncio.create_task(stream) for stream in streams]
        await asyncio.gather(tasks[0], tasks[2])
        await engine.abort("request 1")
        await tasks[1]
        stats = engine.stats()
    print(f"{stats.num_passes} passes with {stats.num_rows} rows for all of them")


def main() -> None:
    asyncio.run(serve())


if __name__ == "__main__":
    main()
