"""Settings that make shipped recipes small."""

DIGITS = ("epochs=1", "model.options.width=8", "batch_size=128", "metrics=[]")
IMAGES = (
    "epochs=1",
    "batch_size=24",
    "microbatches=8",
    "metrics=[]",
    "model.name=torchvision:resnet18",
    "data.options.image_size=64",
)
