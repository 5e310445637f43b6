//! A certificate authority of one test deployment, with a server and a client certificate. Files
//! only; who uses them is decided elsewhere.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};

use crate::error::TestbedError;

/// The PEM files of a deployment that speaks TLS.
#[derive(Clone, Debug)]
pub struct Certificates {
    /// The authority that signed both others.
    pub ca_file: PathBuf,
    /// Certificate and key of the members.
    pub server_file: PathBuf,
    /// Certificate and key for clients.
    pub client_file: PathBuf,
}

impl Certificates {
    /// Makes a new authority and writes the files into `directory`. The server's certificate is
    /// valid for `localhost` and the given addresses.
    pub fn generate(directory: &Path, addresses: &[IpAddr]) -> Result<Self, TestbedError> {
        let mut ca = CertificateParams::new(Vec::<String>::new())?;
        ca.distinguished_name.push(DnType::CommonName, "halocline testbed authority");
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let ca = CertifiedIssuer::self_signed(ca, KeyPair::generate()?)?;

        let mut names = vec!["localhost".to_owned()];
        names.extend(addresses.iter().map(IpAddr::to_string));
        // Members are each other's clients too.
        let server = leaf(
            "halocline testbed server",
            names,
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth],
        )?;
        let client = leaf(
            "halocline testbed client",
            Vec::new(),
            vec![ExtendedKeyUsagePurpose::ClientAuth],
        )?;

        let files = Self {
            ca_file: directory.join("ca.pem"),
            server_file: directory.join("server.pem"),
            client_file: directory.join("client.pem"),
        };
        write(&files.ca_file, &ca.pem())?;
        for (params, file) in [(server, &files.server_file), (client, &files.client_file)] {
            let key = KeyPair::generate()?;
            let certificate = params.signed_by(&key, &ca)?;
            write(file, &format!("{}{}", certificate.pem(), key.serialize_pem()))?;
        }
        Ok(files)
    }
}

fn leaf(
    common_name: &str,
    names: Vec<String>,
    usages: Vec<ExtendedKeyUsagePurpose>,
) -> Result<CertificateParams, TestbedError> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, common_name);
    // Another organizational unit than the members': equal ones would make a client a member.
    params.distinguished_name.push(DnType::OrganizationalUnitName, common_name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = usages;
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn write(path: &Path, text: &str) -> Result<(), TestbedError> {
    crate::files::write_private(path, text)
}
