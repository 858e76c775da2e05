"""How many state slots are used, and how many requests wait, over the time of a run."""

from dataclasses import dataclass, field

MOST_POINTS = 1024


@dataclass
class Occupancy:
    """One point a step; every second one is dropped when there are too many, so that a report has
    between 512 and 1,024 of a long run, evenly spaced in steps."""

    points: list[tuple[float, int, int]] = field(default_factory=list)
    stride: int = 1
    step: int = 0

    def note(self, time_s: float, slots: int, waiting: int) -> None:
        """A step that begins so many seconds after the run did."""
        if self.step % self.stride == 0:
            self.points.append((time_s, slots, waiting))
            if len(self.points) > MOST_POINTS:
                self.points = self.points[::2]
                self.stride *= 2
        self.step += 1

    def as_report(self) -> dict[str, list]:
        return {
            "time_s": [round(time_s, 6) for time_s, _, _ in self.points],
            "slots": [slots for _, slots, _ in self.points],
            "waiting": [waiting for _, _, waiting in self.points],
        }
