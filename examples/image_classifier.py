"""A ResNet on handwritten digits or CIFAR-10, on one process or many, on CPUs or GPUs.

    python examples/image_classifier.py
    horovodrun -np 2 python examples/image_classifier.py --fp16-allreduce --batches-per-allreduce 2
    horovodrun -np 2 python examples/image_classifier.py --resume        # after a crash: continue with the same result
    horovodrun -np 4 python examples/image_classifier.py --data cifar10 --data-dir data --download --epochs 30
    python examples/image_classifier.py --synthetic --depth 50 --image-size 224 --num-classes 1000

On GPUs add --compile. The last command only measures images per second. The training itself is
`hora.labs.images.training.train`.
"""

import horovod.torch as hvd
from hora.labs.images.options import ImageOptions
from hora.labs.images.training import measure, train


def main():
    options = ImageOptions.parse(description=__doc__.splitlines()[0])
    if options.synthetic:
        measure(options)
        return
    trained = train(options)
    if hvd.rank() == 0:
        print(f"test accuracy {trained.accuracy:.2%} on {trained.num_ranks} ranks in {trained.seconds:.0f} s")
        print(f"{trained.images_per_s:.0f} images/s; model in {trained.model_path}")


if __name__ == "__main__":
    main()
