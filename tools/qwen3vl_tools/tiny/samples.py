"""What a question about a picture is, and how pictures can be rearranged to test a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from PIL import Image

from qwen3vl_tools.tiny.drawing import Thing

__all__ = ["Picture", "Question", "Sample", "Video", "with_images_swapped", "with_pairs_reversed"]


@dataclass(frozen=True)
class Video:
    """Frames of equal size and how many of them pass in a second."""

    frames: tuple[Image.Image, ...]
    fps: float


@dataclass(frozen=True)
class Question:
    """One question and its only right answer."""

    kind: str
    question: str
    answer: str


@dataclass(frozen=True)
class Picture:
    """What was drawn, and everything that can be asked about it.

    Attributes:
        images: one or two images, or none when there is a video.
        video: the video, if any.
        questions: all questions, of one or more kinds.
        things: what is where; one entry an image, or one a pair of video frames.
        motion: the direction of movement in a video, "" where nothing moves.
    """

    images: tuple[Image.Image, ...]
    video: Video | None
    questions: tuple[Question, ...]
    things: tuple[tuple[Thing, ...], ...] = field(repr=False)
    motion: str = ""


@dataclass(frozen=True)
class Sample:
    """A picture or video and one question about it."""

    kind: str
    images: tuple[Image.Image, ...]
    video: Video | None
    question: str
    answer: str


def with_images_swapped(sample: Sample) -> Sample:
    """The same question with the images in the opposite order; the answer is kept."""
    return replace(sample, images=sample.images[::-1])


def with_pairs_reversed(sample: Sample) -> Sample:
    """The same question with the temporal patches (pairs of frames) in the opposite order.

    Frames inside a pair keep their order, and so do the timestamps; the answer is kept.
    """
    if sample.video is None:
        return sample
    frames = list(sample.video.frames)
    frames += frames[-1:] * (len(frames) % 2)
    pairs = [frames[i : i + 2] for i in range(0, len(frames), 2)]
    turned = tuple(frame for pair in reversed(pairs) for frame in pair)
    return replace(sample, video=replace(sample.video, frames=turned))
