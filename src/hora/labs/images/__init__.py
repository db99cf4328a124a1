"""The images lab, `hora demo images`: a ResNet on handwritten digits or CIFAR-10, on several ranks."""
