"""The examples of the page on the data source: python datasource.py JOURNAL SOCKET DIRECTORY"""

import sys

from pyspark.sql import functions as F

from sbus.spark import get_session

journal, socket, directory = sys.argv[1:]

# [session]
spark = get_session()
# [read]
rows = spark.read.format("sbus").option("journal", journal).load()
rows.where("kind = 'message'").groupBy("key").count().orderBy("key").show()
# [pattern]
loads = (
    spark.read.format("sbus")
    .option("journal", journal)
    .option("pattern", "hosts/*/load")
    .load()
    .select("time", F.split("key", "/")[1].alias("host"), F.decode("payload", "UTF-8").cast("double").alias("load"))
)
loads.groupBy("host").agg(F.max("load").alias("highest")).orderBy("host").show()
# [few columns]
lengths = spark.read.format("sbus").option("journal", journal).schema("time TIMESTAMP, payload BINARY").load()
lengths.groupBy(F.window("time", "1 hour").start.alias("hour")).agg(F.sum(F.length("payload"))).show()
# [time range]
hour = (
    spark.read.format("sbus")
    .options(journal=journal, pattern="hosts/", since="2026-05-01 06:00", until="2026-05-01 07:00")
    .schema("time TIMESTAMP, key STRING, payload BINARY")
    .load()
)
hour.where("payload <> X''").show()
# [gaps]
rows.where("kind <> 'message'").select("time", "kind", F.decode("payload", "UTF-8").alias("what")).show(truncate=False)
# [stream]
stream = spark.readStream.format("sbus").option("journal", journal).option("maxRowsPerTrigger", 100_000).load()
query = (
    stream.where("kind = 'message'")
    .writeStream.format("parquet")
    .option("path", f"{directory}/messages")
    .option("checkpointLocation", f"{directory}/messages-checkpoint")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
# [publish]
highest = loads.groupBy("host").agg(F.max("load").alias("load"))
(
    highest.select(
        F.concat(F.lit("highest/"), "host").alias("key"),
        F.to_json(F.struct("host", "load")).alias("payload"),
    )
    .write.format("sbus")
    .option("socket", socket)
    .mode("append")
    .save()
)
# [publish a stream]
alerts = (
    stream.where("kind = 'message' AND endswith(key, '/load')")
    .where(F.decode("payload", "UTF-8").cast("double") > 8)
    .select(F.concat(F.lit("alerts/"), "key").alias("key"), "payload")
)
query = (
    alerts.writeStream.format("sbus")
    .option("socket", socket)
    .option("checkpointLocation", f"{directory}/alerts-checkpoint")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
