//! Writes results as one JSON document, described by `schema.json`.

use super::results::Results;

/// The published JSON Schema (draft 2020-12) of what `render` writes.
pub const SCHEMA_TEXT: &str = include_str!("schema.json");

/// The whole document, indented, with a line feed at its end.
pub fn render(results: &Results) -> String {
    let mut text =
        serde_json::to_string_pretty(results).expect("results are plain numbers, texts and lists with text keys");
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::report::fixtures::*;
    use crate::stats::summarise;
    use crate::units::{Bytes, rate_gbps};

    fn schema() -> Value {
        serde_json::from_str(SCHEMA_TEXT).unwrap()
    }

    fn validator() -> jsonschema::Validator {
        jsonschema::draft202012::new(&schema()).unwrap()
    }

    fn check(results: &Results) -> Vec<String> {
        let document: Value = serde_json::from_str(&render(results)).unwrap();
        validator().iter_errors(&document).map(|err| format!("{}: {err}", err.instance_path())).collect()
    }

    #[test]
    fn the_schema_is_a_schema() {
        assert!(jsonschema::draft202012::meta::is_valid(&schema()));
    }

    #[test]
    fn every_kind_of_result_follows_the_schema() {
        assert_eq!(check(&varied()), [""; 0]);
        assert_eq!(check(&results(Vec::new())), [""; 0]);
    }

    #[test]
    fn reading_gives_back_what_was_written() {
        for results in [varied(), results(Vec::new())] {
            assert_eq!(serde_json::from_str::<Results>(&render(&results)).unwrap(), results);
        }
    }

    #[test]
    fn results_of_another_shape_are_refused() {
        let good: Value = serde_json::from_str(&render(&varied())).unwrap();
        let validator = validator();
        assert!(validator.is_valid(&good));
        for (pointer, wrong) in [
            ("/schema", json!(2)),
            ("/schema", json!("1")),
            ("/tests", json!({})),
            ("/tests/2/name", json!(1)),
            ("/tests/2/outcome", json!("fine")),
            ("/tests/2/rate_gbps", json!("20.0")),
            ("/tests/2/transfers/0/bytes", json!(1.5)),
            ("/tests/2/transfers/0/verified", json!(true)),
            ("/tests/2/transfers/0/clock", json!("wall")),
            ("/tests/2/transfers/0/samples_us/0", Value::Null),
            ("/tests/2/transfers/0/time_us/median", Value::Null),
            ("/tests/2/transfers/0/time_us/ci95", json!([1.0])),
            ("/tests/2/transfers/0/mismatch/wrong_bytes", json!(-4)),
            ("/world/1/devices/0/memory_kinds/0", json!("Magnetic")),
            ("/job/emulated", json!("yes")),
        ] {
            let mut bad = good.clone();
            *bad.pointer_mut(pointer).unwrap() = wrong;
            assert!(!validator.is_valid(&bad), "{pointer}");
        }
        for pointer in
            ["", "/job", "/tests/2", "/tests/2/transfers/0", "/tests/2/transfers/0/time_us", "/world/0/caches"]
        {
            let mut bad = good.clone();
            bad.pointer_mut(pointer).unwrap().as_object_mut().unwrap().insert("extra".to_owned(), json!(1));
            assert!(!validator.is_valid(&bad), "{pointer} takes unknown keys");
        }
    }

    /// Every schema of an object, with where it stands.
    fn objects<'a>(schema: &'a Value, path: String, found: &mut Vec<(String, &'a Value)>) {
        if schema.get("properties").is_some_and(|properties| schema["type"] == "object" && properties.is_object()) {
            found.push((path.clone(), schema));
        }
        match schema {
            Value::Object(map) => map.iter().for_each(|(key, part)| objects(part, format!("{path}/{key}"), found)),
            Value::Array(list) => list.iter().for_each(|part| objects(part, path.clone(), found)),
            _ => {}
        }
    }

    #[test]
    fn the_schema_is_closed_and_describes_every_property() {
        let schema = schema();
        let mut found = Vec::new();
        objects(&schema, String::new(), &mut found);
        assert!(found.len() >= 12, "{}", found.len());
        for (path, object) in found {
            assert_eq!(object["additionalProperties"], false, "{path}");
            let properties = object["properties"].as_object().unwrap();
            let required: Vec<&str> = object["required"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
            assert!(properties.keys().eq(required), "{path} requires all it has");
            for (key, property) in properties {
                let described = property.get("description").or(property.get("$ref"));
                assert!(described.is_some_and(|text| text != ""), "{path}/{key}");
            }
        }
    }

    #[test]
    fn the_schema_number_is_that_of_the_code() {
        assert_eq!(schema()["properties"]["schema"]["const"], super::super::results::SCHEMA);
    }

    /// serde_json writes what is no number as null, which the reader takes for "not measured".
    #[test]
    fn no_figure_is_ever_infinite_or_not_a_number() {
        for sample in [0.0, f64::MIN_POSITIVE, f64::MAX, f64::NAN, f64::INFINITY, -0.0] {
            let mut results = results(vec![step("edge", MIB, 0, 1.0)]);
            let transfer = &mut results.tests[0].transfers[0];
            transfer.time_us = summarise(&[sample, 1.0, sample, sample]);
            transfer.rate_gbps = transfer.time_us.as_ref().and_then(|time| rate_gbps(Bytes(MIB), time.median));
            assert_eq!(check(&results), [""; 0], "{sample}");
            assert_eq!(serde_json::from_str::<Results>(&render(&results)).unwrap(), results);
        }
    }

    #[test]
    fn numbers_are_exact_and_text_is_kept() {
        let text = render(&varied());
        assert!(text.ends_with("}\n"));
        let document: Value = serde_json::from_str(&text).unwrap();
        let names: Vec<&str> =
            document["tests"].as_array().unwrap().iter().map(|test| test["name"].as_str().unwrap()).collect();
        assert!(names.contains(&"comma, quote \" and\nnewline") && names.contains(&"=1+1"));
        assert!(names.contains(&"caf\u{e9} \u{2192} \u{1F680}"));
        assert!(document["tests"][2]["rate_gbps"].is_f64());
    }
}
