"""Forecast a monthly series two years ahead, with intervals, and smooth what was known.

python examples/forecast.py --plot forecast.png

The series is that of airline passengers, 1949 to 1960 (G. E. P. Box, G. M. Jenkins, Time Series
Analysis, 1970), in thousands. The network sees one month at a time, and its states remember the
months before; SLSTM layers also learn what the later months tell of the earlier ones.
"""

import argparse

import numpy as np
import pytagi
from pictures import BLUE, VERMILION, band, interval, panels, save
from pytagi.nn import SLSTM, Sequential, SLinear

from tagi_ddp import accelerate

PASSENGERS = """
112 118 132 129 121 135 148 148 136 119 104 118 115 126 141 135 125 149 170 170 158 133 114 140
145 150 178 163 172 178 199 199 184 162 146 166 171 180 193 181 183 218 230 242 209 191 172 194
196 196 236 235 229 243 264 272 237 211 180 201 204 188 235 227 234 264 302 293 259 229 203 229
242 233 267 269 270 315 364 347 312 274 237 278 284 277 317 313 318 374 413 405 355 306 271 306
315 301 356 348 355 422 465 467 404 347 305 336 340 318 362 348 363 435 491 505 404 359 310 337
360 342 406 396 420 472 548 559 463 407 362 405 417 391 419 461 472 535 622 606 508 461 390 432
"""
AHEAD, YEAR = 24, 12


def inputs(growth, month):
    """Return what the network sees of a month: last month's and last year's growth, the season."""
    angle = 2 * np.pi * month / YEAR
    values = [growth[month - 1], growth[month - YEAR], np.sin(angle), np.cos(angle)]
    return np.array(values, np.float32)


def train(growth, months, epochs):
    """Return the network after passes over the series, and the smoothed outputs of the last."""
    pytagi.manual_seed(1)
    model = accelerate(
        Sequential(SLSTM(4, 20, seq_len=1), SLSTM(20, 20, seq_len=1), SLinear(20, 1))
    )
    model.num_samples = len(months)
    for epoch in range(epochs):
        noise = np.array([max(0.3, 0.9**epoch) ** 2], np.float32)
        for month in months:
            model.learn(inputs(growth, month), growth[month : month + 1], noise)
        remembered = model.get_lstm_states()
        smoothed = model.smoother()
    model.set_lstm_states(remembered)  # those of the series' end: the smoother forgets
    return model, smoothed, float(noise[0])


def plot(path, passengers, forecast, growth, smoothed):
    figure, (above, below) = panels(2, (8, 6), sharex=True)
    years = 1949 + np.arange(len(passengers)) / YEAR
    band(above, years[-AHEAD:], *forecast, VERMILION, "forecast")
    above.plot(years, passengers, color=BLUE, label="passengers")
    above.set(title="Forecast of two unseen years", ylabel="passengers, thousands", ylim=(0, 900))
    band(below, years[YEAR:-AHEAD], *smoothed, VERMILION, "smoothed")
    below.plot(years[YEAR:-AHEAD], growth, ".", color=BLUE, label="observed")
    title = "Growth without its noise, by the months before and after"
    below.set(title=title, ylabel="log growth a month, in %")
    below.set(xlabel="year", xticks=range(1949, 1962), xlim=(1949, 1961), ylim=(-25, 35))
    for axes in (above, below):
        axes.legend(loc="upper left", ncols=3)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--plot", default="forecast.png", help="where the PNG file goes")
    options = parser.parse_args()
    level = np.log(np.array(PASSENGERS.split(), float))
    growth, known = np.diff(level, prepend=level[0]), len(level) - AHEAD
    scale = growth[:known].std()
    growth = (growth / scale).astype(np.float32)
    months = range(YEAR, known)

    model, smoothed, noise = train(growth, months, options.epochs)
    growth[known:] = np.nan  # nobody knows them
    variances = np.empty(AHEAD)
    for month in range(known, len(level)):
        mean, variance = model.predict(inputs(growth, month), noise)
        growth[month], variances[month - known] = mean.item(), variance.item()
    middle = level[known - 1] + scale * np.cumsum(growth[known:], dtype=float)
    low, middle, high = forecast = np.exp(interval(middle, scale**2 * np.cumsum(variances)))
    actual = np.exp(level[known:])
    within = np.mean((low < actual) & (actual < high))
    print(f"{AHEAD} months ahead: mean absolute error {np.mean(np.abs(middle / actual - 1)):.1%}")
    print(f"{within:.0%} of the months are within their 95% interval")

    percent, smoothed = 100 * scale, interval(*smoothed)
    plot(options.plot, np.exp(level), forecast, percent * growth[months], percent * smoothed)


if __name__ == "__main__":
    main()
