"""`python -m orchestrator.simulated SEED [SEED ...]`: replay seeds and print the results."""

import sys

from orchestrator.simulated.restarts import live
from orchestrator.simulated.scenario import wild


def main(words: list[str]) -> int:
    if not words or not all(word.isdigit() for word in words):
        sys.stderr.write("usage: python -m orchestrator.simulated SEED [SEED ...]\n")
        return 2
    failed = 0
    for word in words:
        story = live(wild(int(word)))
        failed += bool(story.breach)
        sys.stdout.write(
            f"seed {story.seed}: {story.breach or 'every invariant held'}; {story.events} events, "
            f"{story.lives} lives, {story.launches} machines, {story.evictions} evictions, "
            f"${story.spent_usd:.4f} spent, jobs {story.jobs}\n"
        )
        if story.breach:
            sys.stdout.write("".join(f"  {line}\n" for line in story.last_sentences[-12:]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
