"""Learn handwritten digits one at a time, each from a single look, and plot what is known when.

python examples/stream.py --plot stream.png

Every digit is first predicted, then learned, then forgotten. No learning rate is chosen: each
weight's variance says how much it has still to learn.
"""

import argparse

import numpy as np
from pictures import BLUE, VERMILION, panels, save
from sklearn.datasets import load_digits

from tagi_ddp.sklearn import TAGIClassifier

WINDOW = 100  # digits over which the plot averages


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plot", default="stream.png", help="where the PNG file goes")
    options = parser.parse_args()
    digits, labels = load_digits(return_X_y=True)
    digits = digits / 8 - 1  # known beforehand: grey values are from 0 to 16
    model = TAGIClassifier(hidden_layer_sizes=(100,), noise=0.3, batch_size=1, random_state=0)
    model.partial_fit(digits[:1], labels[:1], classes=range(10))
    sure, right = [], []
    for number in range(1, len(labels)):
        digit, label = digits[number : number + 1], labels[number : number + 1]
        probabilities = model.predict_proba(digit)[0]
        sure.append(probabilities.max())
        right.append(model.classes_[probabilities.argmax()] == label[0])
        model.partial_fit(digit, label)
    print(f"of the last 500 digits {np.mean(right[-500:]):.1%} were right at first sight")
    print(f"{np.mean(sure[-500:]):.1%} were expected to be")

    figure, axes = panels()
    weights = np.full(WINDOW, 1 / WINDOW)
    seen = np.arange(WINDOW, len(labels))
    axes.plot(seen, 100 * np.convolve(right, weights, "valid"), BLUE, label="right")
    expected = 100 * np.convolve(sure, weights, "valid")
    axes.plot(seen, expected, "--", color=VERMILION, label="expected to be right")
    axes.set(
        xlabel="digits seen so far",
        ylabel=f"of the {WINDOW} before, in %",
        ylim=(0, 100),
        title="Digits predicted before they are learned",
    )
    axes.legend()
    save(figure, options.plot)


if __name__ == "__main__":
    main()
