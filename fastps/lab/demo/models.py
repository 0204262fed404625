"""The models of the main job: small enough that four workers on two cores train one in seconds."""

import torch
from torch import nn

from fastps.lab.demo.data import CLASSES, Bytes, Dataset


def model_for(data: Dataset) -> nn.Module:
    """A CNN for images of 28x28 or 32x32, a perceptron for 8x8 digits; initialised from torch's current seed."""
    channels, height, width = data.train_images.shape[1:]
    if height < 16:
        return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    first, second = (8, 16) if channels == 1 else (16, 32)
    features = second * (height // 4) * (width // 4)
    return nn.Sequential(
        nn.Conv2d(channels, first, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(features, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def inputs_of(data: Dataset, images: Bytes) -> torch.Tensor:
    """Return images in a model's input form: float32[images, channels, height, width], each channel normalised."""
    mean, deviation = (torch.tensor(values).view(1, -1, 1, 1) for values in (data.mean, data.deviation))
    return (torch.tensor(images).float() - mean) / deviation


def accuracy(model: nn.Module, data: Dataset) -> float:
    """Return the fraction of correctly classified test images, 0 to 1."""
    was_training = model.training
    model.eval()
    right = 0
    with torch.no_grad():
        for first in range(0, len(data.test_labels), 500):
            part = slice(first, first + 500)
            named = model(inputs_of(data, data.test_images[part])).argmax(1)
            right += int((named == torch.tensor(data.test_labels[part])).sum())
    model.train(was_training)
    return right / len(data.test_labels)
