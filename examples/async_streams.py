"""Several answers at a time, each printed as it settles; one is ended before it is done."""

import asyncio

from unmask import LLM, AsyncEngine
from unmask.problems import make_problems


async def follow(engine: AsyncEngine, name: str, question: str) -> None:
    """Print what settles, and how it ended."""
    async for chunk in engine.generate({"messages": [{"role": "user", "content": question}]}, request_id=name):
        if chunk.delta:
            print(f"{name}: {chunk.delta!r}")
        if chunk.output is not None:
            print(f"{name}: {chunk.output.outputs[0].finish_reason}")


async def serve() -> None:
    questions = [problem["question"] for problem in make_problems(7, 3, split="test")]
    async with AsyncEngine(LLM()) as engine:
        tasks = [asyncio.create_task(follow(engine, f"request {i}", text)) for i, text in enumerate(questions)]
        await asyncio.sleep(0)  # all are queued now
        await engine.abort("request 1")
        await asyncio.gather(*tasks)
        stats = engine.stats()
    print(f"{stats.num_passes} passes with {stats.num_rows} rows for all of them")


def main() -> None:
    asyncio.run(serve())


if __name__ == "__main__":
    main()
