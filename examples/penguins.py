"""An analysis as an agent would write it: clean the Palmer penguins, group, fit a line, draw a chart.

Runs inside a sandbox: reads penguins.csv from the work folder and leaves summary.csv and penguins.png there.
"""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

table = pd.read_csv("penguins.csv")
measures = ["bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g"]
penguins = table.dropna(subset=measures)
print(f"{len(table)} penguins, {len(table) - len(penguins)} without measurements left out")

summary = (
    penguins.groupby(["species", "island"])[measures]
    .mean()
    .round(1)
    .assign(penguins=penguins.groupby(["species", "island"]).size())
)
summary.to_csv("summary.csv")
print(summary.to_string())

print("\nbody mass by flipper length, least squares:")
figure, axes = plt.subplots(figsize=(7, 5))
for species, group in penguins.groupby("species"):
    flipper, mass = group["flipper_length_mm"].to_numpy(), group["body_mass_g"].to_numpy()
    slope, intercept = np.polyfit(flipper, mass, 1)
    r_squared = np.corrcoef(flipper, mass)[0, 1] ** 2
    print(f"  {species:<10} {slope:5.1f} g per mm, R² = {r_squared:.2f}, n = {len(group)}")
    points = axes.scatter(flipper, mass, s=14, alpha=0.6, label=species)
    ends = np.array([flipper.min(), flipper.max()])
    axes.plot(ends, slope * ends + intercept, color=points.get_facecolor()[0], alpha=1)
axes.set(xlabel="flipper length (mm)", ylabel="body mass (g)", title="Palmer penguins")
axes.legend()
figure.savefig("penguins.png", dpi=120)
