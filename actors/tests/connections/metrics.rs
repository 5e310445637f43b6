//! The metrics of this process, which all its tests share: tests look at differences.

use std::sync::LazyLock;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

static RECORDER: LazyLock<PrometheusHandle> =
    LazyLock::new(|| PrometheusBuilder::new().install_recorder().unwrap());

/// The value of a series, 0 if it is not there. Called once before anything is counted.
pub fn value(series: &str) -> f64 {
    let text = RECORDER.render();
    let line = text.lines().find_map(|line| line.strip_prefix(series));
    line.map_or(0.0, |rest| rest.trim().parse().unwrap())
}

/// `halocline_protocol_errors_total` of one kind.
pub fn protocol_errors(kind: &str) -> f64 {
    value(&format!("halocline_protocol_errors_total{{kind=\"{kind}\"}}"))
}

/// `halocline_errors_total` of one kind.
pub fn errors(kind: &str) -> f64 {
    value(&format!("halocline_errors_total{{kind=\"{kind}\"}}"))
}
