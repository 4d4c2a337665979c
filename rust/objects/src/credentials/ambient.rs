//! What a cloud gives to what runs in it. Only where its environment variables say so: asking for
//! instance metadata hangs everywhere else.

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey as Key, AwsCredentialProvider};

use super::Variables;

/// Each way, by the variables that it needs and what they set.
const WAYS: [&[(&str, Key)]; 5] = [
    &[
        ("AWS_WEB_IDENTITY_TOKEN_FILE", Key::WebIdentityTokenFile),
        ("AWS_ROLE_ARN", Key::RoleArn),
    ],
    &[(
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        Key::ContainerCredentialsRelativeUri,
    )],
    &[
        (
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            Key::ContainerCredentialsFullUri,
        ),
        (
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
            Key::ContainerAuthorizationTokenFile,
        ),
    ],
    &[("AWS_METADATA_ENDPOINT", Key::MetadataEndpoint)],
    &[("AWS_EC2_METADATA_SERVICE_ENDPOINT", Key::MetadataEndpoint)],
];

const EXTRAS: [(&str, Key); 3] = [
    ("AWS_ROLE_SESSION_NAME", Key::RoleSessionName),
    ("AWS_ENDPOINT_URL_STS", Key::StsEndpoint),
    ("AWS_REGION", Key::Region),
];

pub(super) fn provider(variables: Variables<'_>) -> Option<AwsCredentialProvider> {
    let way = WAYS
        .iter()
        .find(|way| way.iter().all(|(name, _)| variables(name).is_some()))?;
    let mut builder = AmazonS3Builder::new().with_bucket_name("unused");
    for (name, key) in way.iter().chain(&EXTRAS) {
        if let Some(value) = variables(name) {
            builder = builder.with_config(*key, value);
        }
    }
    builder
        .build()
        .ok()
        .map(|store| store.credentials().clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_environment_names() {
        crate::s3::use_ring();
        assert!(provider(&|_| None).is_none());
        let role = |name: &str| (name == "AWS_ROLE_ARN").then(|| "arn".into());
        assert!(provider(&role).is_none(), "half a way is none");
        let metadata =
            |name: &str| (name == "AWS_METADATA_ENDPOINT").then(|| "http://127.0.0.1:9".into());
        assert!(provider(&metadata).is_some());
    }
}
