"""The networks of the paper and of its rivals, one file each."""

from subcaps.models.mnist_cnn import MnistCNN
from subcaps.models.resnet_cifar import ResNetCifar

__all__ = ["MnistCNN", "ResNetCifar"]
