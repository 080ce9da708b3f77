"""Load a checkpoint in LLaDA's or Dream's layout from a directory or the hub, and say what was found.

python examples/load_llada.py GSAI-ML/LLaDA-1.5 --dtype bfloat16 --device cuda "Why is the sky blue?"
"""

import argparse

from unmask import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory or a hub name")
    parser.add_argument("prompt", nargs="?", help="asked as a single message; without it, a few tokens are written")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, device=args.device)
    config = llm.model.config
    print(f"{config.family}: {config.num_layers} layers, width {config.hidden_size}, vocabulary {config.vocab_size}")
    print(f"method {llm.method.name}: {llm.method.title}")
    params = SamplingParams(max_tokens=args.max_tokens)
    if args.prompt is not None:
        print(llm.chat([{"role": "user", "content": args.prompt}], params)[0].outputs[0].text)
    else:
        result = llm.generate({"prompt_token_ids": [1, 3, 5]}, params)[0].outputs[0]
        print(f"ids {result.token_ids}")


if __name__ == "__main__":
    main()
