CREATE TEMPORARY VIEW bus (key STRING, payload BINARY)
USING sbus
OPTIONS (journal '/var/lib/sbus/journal', pattern 'plant/');

CREATE TEMPORARY VIEW parsed AS
SELECT key, payload, try_parse_json(decode(payload, 'UTF-8')) AS value
FROM bus;

SELECT key, try_variant_get(value, '$.temperature', 'double') AS temperature, value:unit::STRING AS unit
FROM parsed
ORDER BY temperature DESC NULLS LAST;

SELECT schema_of_variant_agg(value) AS fields, count_if(value IS NULL) AS no_json
FROM parsed;
