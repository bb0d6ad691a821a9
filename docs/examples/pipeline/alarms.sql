CREATE TABLE alarms USING sbus OPTIONS (socket '/run/sbus.sock', id 'id');

CREATE TEMPORARY VIEW readings (journal STRING, seq BIGINT, key STRING, payload BINARY)
USING sbus
OPTIONS (journal '/var/lib/sbus/journal', pattern 'plant/');

INSERT INTO alarms
SELECT concat('alarms/', key) AS key, payload, concat(journal, '-', seq) AS id
FROM readings
WHERE try_variant_get(try_parse_json(decode(payload, 'UTF-8')), '$.temperature', 'double') > 80;
