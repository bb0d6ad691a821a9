"""Readings from a journal, and alarms from them on the bus."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()


@dp.temporary_view
def readings() -> DataFrame:
    """Each message of the plant, with its fields."""
    return (
        spark.readStream.format("sbus")
        .options(journal=spark.conf.get("plant.journal"), pattern="plant/")
        .options(payloadFormat="json", payloadSchema="temperature DOUBLE, unit STRING")
        .load()
        .select("journal", "seq", "time", "key", "value.*", "problem")
    )


dp.create_sink("alarms", "sbus", {"socket": spark.conf.get("plant.socket") or "", "id": "id"})


@dp.append_flow(target="alarms")
def hot() -> DataFrame:
    """An alarm for each reading above 80 degrees; its id is the row that it comes from."""
    return (
        spark.readStream.table("readings")
        .where("temperature > 80")
        .selectExpr(
            "concat('alarms/', key) AS key",
            "to_json(struct(temperature, unit, time)) AS payload",
            "concat(journal, '-', seq) AS id",
        )
    )
