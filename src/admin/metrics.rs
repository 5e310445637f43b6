//! The process's metrics recorder and its rendering for Prometheus. What is counted is said where it
//! happens, with the `metrics` macros.

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

/// Bounds of every histogram of times, in seconds: from the fastest answer of a server in memory to
/// the longest wait that an operation may have.
const SECONDS: &[f64] = &[
    0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
    2.0, 5.0, 10.0, 30.0,
];

/// Histograms are kept in a queue between two scrapes; this empties it when nobody scrapes.
pub(super) const UPKEEP: std::time::Duration = std::time::Duration::from_secs(5);

fn builder() -> Result<PrometheusBuilder, BuildError> {
    // Suffixes and bounds are ours and not empty, which is all that can be wrong with them.
    PrometheusBuilder::new().set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)
}

/// Makes this process's metrics recordable, once, before anything is counted.
pub fn install() -> Result<PrometheusHandle, BuildError> {
    let handle = builder()?.install_recorder()?;
    metrics::describe_gauge!("halocline_build_info", "1, labelled with the running version");
    metrics::gauge!("halocline_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    Ok(handle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_histograms_with_buckets_and_never_summaries() {
        let recorder = builder().unwrap().build_recorder();
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            metrics::histogram!("halocline_request_seconds", "command" => "find", "tier" => "fast")
                .record(0.000_3);
            metrics::histogram!("halocline_faultin_seconds").record(0.3);
            metrics::gauge!("halocline_feeder_lag_seconds").set(0.25);
        });
        let text = handle.render();
        assert!(text.contains("# TYPE halocline_request_seconds histogram"), "{text}");
        assert!(text.contains(r#"tier="fast",le="0.0005"} 1"#), "{text}");
        assert!(text.contains(r#"tier="fast",le="0.0002"} 0"#), "{text}");
        assert!(text.contains("# TYPE halocline_faultin_seconds histogram"), "{text}");
        assert!(text.contains("halocline_feeder_lag_seconds 0.25"), "{text}");
        assert!(!text.contains("quantile"), "{text}");
    }
}
